"""Transcripts that are put together of several takes: the pieces of a session."""

from collections.abc import Iterable, Sequence

from attrs import field, frozen

from headrace_http_api.audio_ports import TimedSegment, TimedWord, Transcript, VocabularyUse

__all__ = ["JoinedTranscript", "Segment", "Word", "settle", "shifted", "shifted_words"]

# A segment that ends so near to the end of its window may have been cut off there.
EDGE_S = 0.5
# After the last segment so much of a window is heard again: a word may begin in it.
OVERLAP_S = 1.0


@frozen(kw_only=True)
class Word:
    """A word at its time in the session."""

    text: str = field(repr=False)
    start_s: float
    end_s: float
    probability: float


@frozen(kw_only=True)
class Segment:
    """A segment at its time in the session."""

    text: str = field(repr=False)
    start_s: float
    end_s: float
    tokens: Sequence[int] = field(repr=False)
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: tuple[Word, ...] = field(repr=False)


@frozen(kw_only=True)
class JoinedTranscript:
    """A transcript of segments, as `Transcript` has it."""

    language: str
    duration_s: float
    segments: tuple[Segment, ...]
    vocabulary: VocabularyUse | None = None

    @property
    def text(self) -> str:
        """The texts of all segments, one after the other."""
        return "".join(segment.text for segment in self.segments).strip()


def shifted(segment: TimedSegment, by_s: float) -> Segment:
    """Return a segment of a take that began so many seconds into the session."""
    return Segment(
        text=segment.text,
        start_s=segment.start_s + by_s,
        end_s=segment.end_s + by_s,
        tokens=tuple(segment.tokens),
        temperature=segment.temperature,
        avg_logprob=segment.avg_logprob,
        compression_ratio=segment.compression_ratio,
        no_speech_prob=segment.no_speech_prob,
        words=shifted_words(segment.words, by_s),
    )


def shifted_words(words: Iterable[TimedWord], by_s: float) -> tuple[Word, ...]:
    """Return words of a take that began so many seconds into the session."""
    return tuple(
        Word(text=word.text, start_s=word.start_s + by_s, end_s=word.end_s + by_s, probability=word.probability)
        for word in words
    )


def settle(transcript: Transcript, window_s: float) -> tuple[Sequence[TimedSegment], float]:
    """Decide what of a window's transcript is final while audio goes on, and where the next window begins.

    The last segment waits for the next window if it may have been cut off by the end of this one, unless it began in
    the window's first half: then nothing would be gained, and the next window might never come to an end.

    Returns:
        The segments that are final, and the beginning of the next window, in seconds of this one.
    """
    segments = transcript.segments
    if not segments:
        return (), window_s
    last = segments[-1]
    if last.end_s < window_s - EDGE_S:
        return segments, max(last.end_s, window_s - OVERLAP_S)
    if last.start_s < window_s / 2:
        return segments, window_s
    return segments[:-1], last.start_s
