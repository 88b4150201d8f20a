"""One audio while it is transcribed: its spans, how far each has come, and what each window is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, evolve, field

from headrace_models.whisper.config import FRAMES_PER_POSITION
from headrace_models.whisper.fallback import is_silent, needs_retry, without_loop
from headrace_models.whisper.mel import FRAMES_PER_SECOND
from headrace_models.whisper.prompts import open_window
from headrace_models.whisper.results import Segment, Transcription
from headrace_models.whisper.segmenting import cut_window
from headrace_models.whisper.words import place_words

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace_models.whisper.alignment import TimedWord
    from headrace_models.whisper.caches import AudioKeys
    from headrace_models.whisper.decoded import DecodedWindow, LanguageGuess
    from headrace_models.whisper.options import TranscribeOptions
    from headrace_models.whisper.prompts import Opening
    from headrace_models.whisper.results import VocabularyUse
    from headrace_models.whisper.rules import TokenRules
    from headrace_models.whisper.tokenizer import WhisperTokenizer

__all__ = ["Accepted", "Span", "Take", "Window"]

_DOUBTFUL_TEMPERATURE = 0.5


@define(eq=False)
class Span:
    """A stretch of audio whose windows follow one another; times are mel frames."""

    start: int
    end: int
    seek: int
    context: list[int]
    """Tokens that the next window is told came before it."""
    last_speech_s: float
    segments: list[Segment] = field(factory=list[Segment])
    num_emitted: int = 0

    @property
    def is_done(self) -> bool:
        return self.seek >= self.end


@define(eq=False)
class Window:
    """A window on its way: encoded once, decoded at one temperature after the other."""

    take: Take
    span: Span
    seek: int
    num_frames: int
    """Mel frames of audio; the rest is padding."""
    audio: AudioKeys | None = None
    attempt: int = 0

    @property
    def temperature(self) -> float:
        return self.take.options.temperature[self.attempt]

    @property
    def num_positions(self) -> int:
        return max(1, self.num_frames // FRAMES_PER_POSITION)


@define(eq=False)
class Accepted:
    """A window's decoding that stands, and the segments made of it, before words are placed."""

    window: Window
    decoded: DecodedWindow
    segments: list[Segment]
    advance: int
    is_complete: bool
    has_failed: bool

    def text_tokens(self, text_end: int) -> tuple[int, ...]:
        return tuple(token for segment in self.segments for token in segment.tokens if token < text_end)


@define(eq=False)
class Take:
    """An audio and how it is to be transcribed."""

    take_id: int
    options: TranscribeOptions
    tokenizer: WhisperTokenizer
    rules: TokenRules
    mel: NDArray[np.float32]
    duration_s: float
    window_frames: int
    text_context: int
    prompt: tuple[int, ...]
    vocabulary: VocabularyUse | None
    spans: list[Span]
    language: str | None
    language_probability: float | None = None
    num_windows: int = 0
    num_decodings: int = 0

    @property
    def is_done(self) -> bool:
        return all(span.is_done for span in self.spans)

    @property
    def knows_language(self) -> bool:
        return self.language is not None or not self.tokenizer.special.is_multilingual

    @property
    def _keeps_rest(self) -> bool:
        """Whether text at a span's end is kept that no timestamp closes."""
        return self.options.open_end or len(self.spans) > 1

    def learn_language(self, guess: LanguageGuess) -> None:
        self.language, self.language_probability = guess.language, guess.probability

    def next_window(self, span: Span) -> Window:
        """Return the span's next window."""
        return Window(self, span, span.seek, min(self.window_frames, span.end - span.seek))

    def start_tokens(self) -> tuple[int, ...]:
        """Return the tokens that start a transcript, without `<|notimestamps|>`."""
        return self.tokenizer.special.start(language=self.language, task=self.options.task, with_timestamps=True)

    def open(self, window: Window) -> Opening:
        """Return what a window is told."""
        half = self.text_context // 2 - 1
        context = window.span.context
        if self.options.carries_prompt:
            room = max(0, half - len(self.prompt))
            context = [*self.prompt, *(context[-room:] if room else [])]
        is_first = window.seek == 0 and self.options.prefix is not None
        start = self.tokenizer.special.start(
            language=self.language, task=self.options.task, with_timestamps=not self.options.without_timestamps
        )
        return open_window(
            start,
            sot_prev=self.tokenizer.special.sot_prev,
            prompt=context,
            prefix=self.tokenizer.encode_context(self.options.prefix or "") if is_first else [],
            text_context=self.text_context,
        )

    def accept(self, window: Window, decoded: DecodedWindow) -> Accepted:
        """Make segments of a decoding; a silent window has none."""
        has_failed = needs_retry(decoded, self.options)
        decoded = without_loop(decoded)
        self.num_windows += 1
        self.num_decodings += window.attempt + 1
        if is_silent(decoded, self.options):
            return Accepted(window, decoded, [], window.num_frames, is_complete=True, has_failed=False)
        cut = cut_window(
            decoded.tokens,
            timestamp_begin=self.tokenizer.special.timestamp_begin,
            num_frames=window.num_frames,
            ends_in_pause=self._keeps_rest and window.seek + window.num_frames >= window.span.end,
        )
        segments = [
            Segment(
                start_s=self._clock(window.seek + piece.start),
                end_s=self._clock(window.seek + piece.end),
                text=self.tokenizer.decode(piece.tokens),
                tokens=piece.tokens,
                temperature=decoded.temperature,
                avg_logprob=decoded.avg_logprob,
                compression_ratio=decoded.compression_ratio,
                no_speech_prob=decoded.no_speech_prob,
            )
            for piece in cut.pieces
        ]
        return Accepted(window, decoded, segments, cut.advance, is_complete=cut.is_complete, has_failed=has_failed)

    def finish(self, accepted: Accepted, words: list[TimedWord] | None) -> None:
        """Take a window's segments over, and move its span on."""
        span, window = accepted.window.span, accepted.window
        segments, seek = accepted.segments, window.seek + accepted.advance
        offset_s = window.seek / FRAMES_PER_SECOND
        if words is not None and segments:
            segments = place_words(
                segments,
                words,
                offset_s=offset_s,
                last_speech_s=span.last_speech_s,
                duration_s=self.duration_s,
                text_end=self.tokenizer.special.eot,
            )
            ends = [word.end_s for segment in segments for word in segment.words]
            if ends and not accepted.is_complete and ends[-1] > offset_s:
                seek = round(ends[-1] * FRAMES_PER_SECOND)
            span.last_speech_s = max([span.last_speech_s, *ends[-1:]])
        # Whatever was decoded, a window moves on, or the same one would be decoded for ever.
        span.seek = max(seek, window.seek + 1)
        kept = [segment for segment in segments if segment.text.strip() and segment.start_s < segment.end_s]
        span.segments += kept
        self._remember(span, kept, accepted)

    def _remember(self, span: Span, kept: list[Segment], accepted: Accepted) -> None:
        """Keep what was said as the next window's context, unless it cannot be trusted."""
        if not accepted.segments:
            return
        span.context = [*span.context, *(token for segment in kept for token in segment.tokens)]
        is_doubtful = accepted.has_failed or accepted.decoded.temperature > _DOUBTFUL_TEMPERATURE
        if is_doubtful or not self.options.condition_on_previous_text:
            span.context = []

    def emit(self) -> list[Segment]:
        """Return segments that are final and come next in time."""
        ready: list[Segment] = []
        for span in self.spans:
            ready += span.segments[span.num_emitted :]
            span.num_emitted = len(span.segments)
            if not span.is_done:
                break
        return ready

    @property
    def position_s(self) -> float:
        """How far the audio is transcribed without a gap."""
        return min([self._clock(span.seek) for span in self.spans if not span.is_done], default=self.duration_s)

    def result(self) -> Transcription:
        """Return the transcript."""
        segments = tuple(evolve(segment) for span in self.spans for segment in span.segments)
        tokens = [token for segment in segments for token in segment.tokens]
        return Transcription(
            text=self.tokenizer.decode(tokens).strip(),
            language=self.language or "en",
            language_probability=self.language_probability,
            duration_s=self.duration_s,
            segments=segments,
            vocabulary=self.vocabulary,
            num_windows=self.num_windows,
            num_retries=self.num_decodings - self.num_windows,
        )

    def _clock(self, frames: int) -> float:
        return min(round(frames / FRAMES_PER_SECOND, 2), self.duration_s)
