"""Where somebody speaks in audio that comes piece by piece, of a detector's probabilities."""

from collections.abc import Iterable

from attrs import define, field

from headrace_http_api.audio_ports import FRAME_SAMPLES, SAMPLE_RATE, Pcm, SpeechDetector, SpeechFilter

__all__ = ["SpeechTracker"]

FRAME_S = FRAME_SAMPLES / SAMPLE_RATE
# Within speech a frame may be less likely by so much; a shorter pause does not end it. As `headrace_models.audio`.
HYSTERESIS = 0.15
SHORTEST_PAUSE_S = 0.1


@define
class SpeechTracker:
    """Follows speech; what is shorter than the filter's `min_speech_s` counts for none.

    Attributes:
        position_s: how far it has heard.
        spans: where somebody spoke, in order; the last one may go on.
    """

    detector: SpeechDetector
    filter: SpeechFilter
    position_s: float = 0.0
    spans: list[tuple[float, float]] = field(factory=list[tuple[float, float]])
    _start_s: float | None = None
    _end_s: float = 0.0

    async def feed(self, pcm: Pcm) -> None:
        """Hear more audio."""
        self.take(await self.detector.feed(pcm))

    def take(self, probabilities: Iterable[float]) -> None:
        """Take the probabilities of the frames that follow."""
        for probability in probabilities:
            if self._start_s is None and probability >= self.filter.threshold:
                self._start_s = self._end_s = self.position_s
            self.position_s += FRAME_S
            if self._start_s is None:
                continue
            if probability >= self.filter.threshold - HYSTERESIS:
                self._end_s = self.position_s
                self._note()
            elif self.position_s - self._end_s >= SHORTEST_PAUSE_S:
                self._start_s = None

    def speaks_in(self, start_s: float, end_s: float) -> bool:
        """Whether there is speech in a stretch."""
        return any(first < end_s and last > start_s for first, last in self.spans)

    @property
    def is_undecided(self) -> bool:
        """Whether something has begun that may become speech."""
        return self._start_s is not None

    @property
    def last_end_s(self) -> float:
        """Where somebody spoke last, as far as is known; 0 if nobody did."""
        return self.spans[-1][1] if self.spans else 0.0

    def pause_after(self, start_s: float, least_s: float) -> float | None:
        """Return where speech ends that a pause of at least `least_s` follows: the first such place after `start_s`."""
        spans = [span for span in self.spans if span[1] > start_s]
        following = [first for first, _ in spans[1:]]
        following += [self._next_sound_s(end_s) for _, end_s in spans[-1:]]
        return next((span[1] for span, then in zip(spans, following, strict=True) if then - span[1] >= least_s), None)

    def quiet_until(self, start_s: float) -> float:
        """Return until where, from `start_s` on, nobody speaks nor begins to do what may become speech."""
        starts = [first for first, last in self.spans if last > start_s]
        return max(start_s, min([*starts, self._next_sound_s(start_s)]))

    def _next_sound_s(self, after_s: float) -> float:
        """Return where something begins after `after_s` that may become speech, or else how far has been heard."""
        return self.position_s if self._start_s is None or self._start_s < after_s else self._start_s

    def forget_before(self, start_s: float) -> None:
        """Drop spans that ended before; they are not asked about again."""
        self.spans = [span for span in self.spans if span[1] > start_s]

    def _note(self) -> None:
        assert self._start_s is not None
        if self._end_s - self._start_s < max(self.filter.min_speech_s, FRAME_S / 2):
            return
        if self.spans and self.spans[-1][0] == self._start_s:
            self.spans[-1] = (self._start_s, self._end_s)
        else:
            self.spans.append((self._start_s, self._end_s))
