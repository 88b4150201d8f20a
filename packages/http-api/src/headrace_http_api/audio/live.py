"""One voice that is transcribed while it speaks: words that stay, words that may change, utterances that are over."""

from collections.abc import Sequence

from attrs import define, evolve, field, frozen

from headrace_http_api.audio.agreement import Agreement, text_of
from headrace_http_api.audio.context import SpokenContext
from headrace_http_api.audio.session import transcribe
from headrace_http_api.audio.speech import SpeechTracker
from headrace_http_api.audio.transcripts import Word, shifted, shifted_words
from headrace_http_api.audio_ports import SAMPLE_RATE, Pcm, TimedWord, Transcriber, Transcript, TranscriptionOptions

__all__ = ["Final", "LiveOptions", "LiveTranscription", "Partial"]

SHORTEST_S = 0.1
# Kept of silence, before what may be speech.
LEAD_S = 0.5
# An utterance that goes on is cut after so long where a sentence has ended, later behind any stable word, and at last
# anyhow, before a window is full. Earlier cuts would save little time; what is heard before helps.
SENTENCE_S = 12.0
WORD_S = 20.0
LONGEST_S = 24.0
# A cut leaves at least so much to hear again.
SHORTEST_REST_S = 1.0
# Of the pause that ends an utterance so much is heard.
TAIL_S = 0.2
# A word is stable no sooner than so long after its end: what follows it may change it.
YOUNGEST_S = 1.0
# No pass hears more; longer audio would take a second window.
WINDOW_S = 28.0

_BYTES_PER_SECOND = 4 * SAMPLE_RATE
_SENTENCE_ENDS = (".", "?", "!", "\u3002", "\uff1f", "\uff01")


@frozen(kw_only=True)
class LiveOptions:
    """How a voice is followed.

    Attributes:
        interval_s: new audio after which it is transcribed again.
        pause_s: a silence that ends an utterance.
    """

    interval_s: float = 0.5
    pause_s: float = 0.8


@frozen
class _Stretch:
    """What is transcribed next, from the beginning of the utterance."""

    until_s: float
    is_over: bool
    """Whether the utterance ends there."""


@frozen(kw_only=True)
class Partial:
    """How an utterance stands: `text` begins with `stable`, and all finals' texts followed by `stable` only grow."""

    utterance: int
    stable: str = field(repr=False)
    text: str = field(repr=False)
    start_s: float
    end_s: float


@frozen(kw_only=True)
class Final:
    """A finished utterance, or the beginning of a long one."""

    utterance: int
    text: str = field(repr=False)
    start_s: float
    end_s: float
    words: tuple[TimedWord, ...] = field(repr=False)


@define(eq=False)
class LiveTranscription:
    """Hears audio and tells what is said. `hear` and `end` may be called while `advance` runs; nothing twice at a time.

    Attributes:
        tracker: looks for speech; None judges by the words alone.
        duration_s: how much was heard.
        finals: utterances that are finished.
        language: of what was said, once something was.
    """

    transcriber: Transcriber
    options: TranscriptionOptions
    tracker: SpeechTracker | None
    live: LiveOptions = field(factory=LiveOptions)
    duration_s: float = 0.0
    finals: list[Final] = field(factory=list[Final])
    language: str = ""
    _buffer: bytearray = field(factory=bytearray, repr=False)
    _start_s: float = 0.0
    # Until where the utterance was transcribed, and until where it is being transcribed now.
    _done_s: float = 0.0
    _doing_s: float | None = None
    _has_ended: bool = False
    _draft: tuple[int, ...] = field(default=(), repr=False)
    _agreement: Agreement = field(factory=Agreement)
    _context: SpokenContext = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._context = SpokenContext(self.options)

    @property
    def backlog_s(self) -> float:
        """How much audio waits to be transcribed for the first time: none does before it is speech."""
        if not self._hears_speech:
            return 0.0
        return self.duration_s - max(self._start_s, self._done_s, self._doing_s or 0.0)

    @property
    def is_due(self) -> bool:
        """Whether there is something to transcribe, or to tell, now."""
        if self.is_over or not self._hears_speech:
            return False
        stretch = self._stretch()
        if self._has_ended or stretch.is_over:
            return True
        if stretch.until_s < self.duration_s:
            # There is more than one pass can hear.
            return True
        if stretch.until_s - self._done_s < self.live.interval_s:
            return False
        # In a pause words are heard once more, so that they may be stable before it is long enough to end anything.
        return self.tracker is None or bool(self._agreement.tentative) or self._speaks_since(self._done_s)

    @property
    def is_over(self) -> bool:
        """Whether the audio has ended and all of it was told."""
        return self._has_ended and (not self._hears_speech or self.duration_s - self._start_s < SHORTEST_S)

    @property
    def is_outdated(self) -> bool:
        """Whether what is being transcribed leaves out what follows it in the utterance, which has ended."""
        stretch = self._stretch()
        return self._doing_s is not None and stretch.is_over and self._doing_s < stretch.until_s

    async def hear(self, pcm: Pcm) -> None:
        """Take audio in."""
        if self.tracker is not None:
            await self.tracker.feed(pcm)
        self._buffer += pcm.data
        self.duration_s += pcm.duration_s
        self._pass_silence()

    def end(self) -> None:
        """Take no more audio in: what is left becomes final."""
        self._has_ended = True

    async def advance(self) -> Sequence[Partial | Final]:
        """Transcribe what was said since the last utterance ended, once, unless that was done to its end."""
        stretch = self._stretch()
        if self._done_s < stretch.until_s:
            words = await self._transcribe(stretch.until_s)
            self._agreement.update(words, stretch.until_s - YOUNGEST_S)
        if stretch.is_over:
            return self._conclude(stretch.until_s)
        if not self._agreement.stable and not self._agreement.tentative and self.tracker is None:
            self._cut(stretch.until_s - LEAD_S)
        events = self._cut_long(stretch.until_s)
        said = [*self._agreement.stable, *self._agreement.tentative]
        if not said:
            return events
        partial = Partial(
            utterance=len(self.finals),
            stable=text_of(self._agreement.stable),
            text=text_of(said),
            start_s=said[0].start_s,
            end_s=said[-1].end_s,
        )
        return [*events, partial]

    async def finish(self) -> Sequence[Partial | Final]:
        """Transcribe all that is left: nothing follows."""
        self.end()
        events: list[Partial | Final] = []
        while self.is_due:
            events += await self.advance()
        return events

    # ---- decisions -------------------------------------------------------------------------------------------

    @property
    def _hears_speech(self) -> bool:
        return self._speaks_since(self._start_s)

    def _speaks_since(self, start_s: float) -> bool:
        return self.tracker is None or self.tracker.speaks_in(start_s, self.duration_s)

    def _stretch(self) -> _Stretch:
        """Decide until where the utterance is transcribed next. It depends on the audio, not on how fast that goes."""
        end_s = self._end_of_words() if self.tracker is None else self._end_of_speech(self.tracker)
        until_s = self.duration_s if end_s is None else min(end_s, self.duration_s)
        # A pass hears no more than a window.
        longest_s = self._start_s + WINDOW_S
        return _Stretch(min(until_s, longest_s), is_over=end_s is not None and until_s <= longest_s)

    def _end_of_speech(self, tracker: SpeechTracker) -> float | None:
        pause_s = tracker.pause_after(self._start_s, self.live.pause_s)
        if pause_s is None and self._has_ended:
            pause_s = self.duration_s if tracker.is_undecided else tracker.last_end_s
        return None if pause_s is None else pause_s + TAIL_S

    def _end_of_words(self) -> float | None:
        """Judge by the words alone, whose times are less sure than a detector's: twice the pause."""
        if self._has_ended:
            return self.duration_s
        last = [*self._agreement.stable, *self._agreement.tentative][-1:]
        has_paused = bool(last) and self._done_s - last[0].end_s >= 2 * self.live.pause_s
        return self._done_s if has_paused else None

    def _conclude(self, until_s: float) -> Sequence[Final]:
        self._agreement.settle()
        events = self._release(len(self._agreement.stable))
        self._agreement.forget()
        self._draft = ()
        self._cut(until_s)
        self._done_s = self._start_s
        self._pass_silence()
        return events

    def _cut_long(self, until_s: float) -> Sequence[Final]:
        """Finish the stable beginning of a long utterance, so that it never outgrows a window."""
        length_s = until_s - self._start_s
        stable = self._agreement.stable
        first_s, last_s = self._start_s + SHORTEST_REST_S, until_s - SHORTEST_REST_S
        if length_s >= LONGEST_S and (not stable or stable[-1].end_s < first_s):
            # It does not even agree with itself: nothing is gained by hearing it again.
            return self._conclude(until_s)
        ends = [
            place
            for place, word in enumerate(stable, start=1)
            if word.text.rstrip().endswith(_SENTENCE_ENDS) and first_s <= word.end_s <= last_s
        ]
        if length_s < SENTENCE_S or not (ends or (stable and length_s >= WORD_S)):
            return []
        count = ends[-1] if ends else len(stable)
        cut_s = stable[count - 1].end_s
        events = self._release(count)
        self._cut(cut_s)
        return events

    def _release(self, count: int) -> list[Final]:
        words = self._agreement.release(count)
        if not words:
            return []
        final = Final(
            utterance=len(self.finals),
            text=text_of(words),
            start_s=words[0].start_s,
            end_s=words[-1].end_s,
            words=tuple(words),
        )
        self.finals.append(final)
        self._context.add(final.text, 0.0)
        return [final]

    # ---- audio -----------------------------------------------------------------------------------------------

    async def _transcribe(self, until_s: float) -> list[Word]:
        num_bytes = round((until_s - self._start_s) * SAMPLE_RATE) * 4
        start_s, window = self._start_s, Pcm(bytes(memoryview(self._buffer)[:num_bytes]))
        options = evolve(
            self.options,
            speech=None,
            language=self.options.language or self.language or None,
            # One alone: more would keep what is said meanwhile waiting, and could not change what is stable.
            temperature=self.options.temperature[:1],
            draft=self._draft,
            open_end=True,
        )
        self._doing_s = until_s
        try:
            transcript = await transcribe(self.transcriber, window, self._context.applied(options))
        finally:
            self._doing_s = None
        self._done_s = until_s
        self._draft = tuple(token for segment in transcript.segments for token in segment.tokens)
        words = _words(transcript, start_s)
        if words and not self.language:
            self.language = transcript.language
        return words

    def _pass_silence(self) -> None:
        """Let go of audio in which nobody speaks, but for what may be the beginning of speech."""
        if self.tracker is not None:
            self._cut(self.tracker.quiet_until(self._start_s) - LEAD_S)

    def _cut(self, at_s: float) -> None:
        num_bytes = max(0, round((at_s - self._start_s) * SAMPLE_RATE)) * 4
        del self._buffer[:num_bytes]
        self._start_s += num_bytes / _BYTES_PER_SECOND
        if self.tracker is not None:
            self.tracker.forget_before(self._start_s)


def _words(transcript: Transcript, start_s: float) -> list[Word]:
    """Return the words at their time in the session; of a segment that has none, its text as one."""
    words: list[Word] = []
    for segment in transcript.segments:
        if segment.words:
            words += shifted_words(segment.words, start_s)
        elif segment.text.strip():
            one = shifted(segment, start_s)
            words.append(Word(text=one.text, start_s=one.start_s, end_s=one.end_s, probability=0.0))
    return words
