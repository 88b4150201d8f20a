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
# An utterance that goes on is cut after so long where a sentence has ended, later behind any stable word: what is heard
# again and again takes longer the more is said in it. At last it is cut anyhow, before a window is full.
SENTENCE_S = 6.0
WORD_S = 12.0
LONGEST_S = 24.0
# A cut leaves at least so much to hear again.
SHORTEST_REST_S = 1.0

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
    """Hears audio and tells what is said. `hear` may be called while `advance` runs; neither twice at a time.

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
    _heard_s: float = 0.0
    _agreement: Agreement = field(factory=Agreement)
    _context: SpokenContext = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._context = SpokenContext(self.options)

    @property
    def backlog_s(self) -> float:
        """How much audio waits to be transcribed for the first time."""
        return self.duration_s - max(self._heard_s, self._start_s)

    @property
    def is_due(self) -> bool:
        """Whether there is something to transcribe now."""
        return self.backlog_s >= self.live.interval_s and (self._hears_speech or self._is_long)

    async def hear(self, pcm: Pcm) -> None:
        """Take audio in."""
        if self.tracker is not None:
            await self.tracker.feed(pcm)
        self._buffer += pcm.data
        self.duration_s += pcm.duration_s
        if self.tracker is not None and not self._hears_speech and not self.tracker.is_undecided:
            self._cut(self.duration_s - LEAD_S)

    async def advance(self) -> Sequence[Partial | Final]:
        """Transcribe what was said since the last utterance ended, once."""
        until_s = self.duration_s
        is_over = self._has_paused(until_s)
        words = await self._transcribe(until_s, is_last=is_over)
        if is_over or self._has_words_and_pause(words, until_s):
            return self._conclude(words, until_s)
        self._agreement.update(words)
        if not words and self.tracker is None:
            self._cut(until_s - LEAD_S)
        events = self._cut_long(until_s)
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

    async def finish(self) -> Sequence[Final]:
        """Transcribe what is left: nothing follows."""
        until_s = self.duration_s
        if not self._hears_speech or until_s - self._start_s < SHORTEST_S:
            return self._conclude((), until_s)
        return self._conclude(await self._transcribe(until_s, is_last=True), until_s)

    # ---- decisions -------------------------------------------------------------------------------------------

    @property
    def _hears_speech(self) -> bool:
        return self.tracker is None or self.tracker.speaks_in(self._start_s, self.duration_s)

    @property
    def _is_long(self) -> bool:
        return self.duration_s - self._start_s >= LONGEST_S

    def _has_paused(self, until_s: float) -> bool:
        tracker = self.tracker
        if tracker is None or tracker.is_undecided or not tracker.speaks_in(self._start_s, until_s):
            return False
        return tracker.pause_s() >= self.live.pause_s

    def _has_words_and_pause(self, words: Sequence[TimedWord], until_s: float) -> bool:
        """Judge by the words alone, whose times are less sure than a detector's: twice the pause."""
        return self.tracker is None and bool(words) and until_s - words[-1].end_s >= 2 * self.live.pause_s

    def _conclude(self, words: Sequence[TimedWord], until_s: float) -> Sequence[Final]:
        self._agreement.conclude(words)
        events = self._release(len(self._agreement.stable))
        self._agreement.forget()
        self._cut(until_s if self.tracker is None else until_s - LEAD_S)
        return events

    def _cut_long(self, until_s: float) -> Sequence[Final]:
        """Finish the stable beginning of a long utterance, so that it never outgrows a window."""
        length_s = until_s - self._start_s
        stable = self._agreement.stable
        ends = [
            place
            for place, word in enumerate(stable, start=1)
            if word.text.rstrip().endswith(_SENTENCE_ENDS) and word.end_s <= until_s - SHORTEST_REST_S
        ]
        if length_s >= LONGEST_S and not stable:
            # It does not even agree with itself: nothing is gained by hearing it again.
            return self._conclude(self._agreement.tentative, until_s)
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

    async def _transcribe(self, until_s: float, *, is_last: bool) -> list[Word]:
        num_bytes = round((until_s - self._start_s) * SAMPLE_RATE) * 4
        start_s, window = self._start_s, Pcm(bytes(memoryview(self._buffer)[:num_bytes]))
        self._heard_s = until_s
        options = evolve(self.options, speech=None, language=self.options.language or self.language or None)
        if not is_last:
            # It will be heard again: a second temperature would only take time.
            options = evolve(options, temperature=options.temperature[:1])
        transcript = await transcribe(self.transcriber, window, self._context.applied(options))
        words = _words(transcript, start_s)
        if words and not self.language:
            self.language = transcript.language
        return words

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
