"""What a transcription gives."""

from attrs import frozen

__all__ = ["Segment", "Transcription", "VocabularyUse", "Word"]


@frozen(kw_only=True)
class Word:
    """A word with its time. Words of a transcription do not overlap and lie within the audio."""

    text: str
    """With the space before it, if there is one, and the punctuation around it."""
    start_s: float
    end_s: float
    probability: float


@frozen(kw_only=True)
class Segment:
    """A stretch of speech."""

    start_s: float
    end_s: float
    text: str
    tokens: tuple[int, ...]
    """Timestamps included."""
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: tuple[Word, ...] = ()


@frozen(kw_only=True)
class VocabularyUse:
    """Which terms of a vocabulary found room in the prompt."""

    included: tuple[str, ...]
    omitted: tuple[str, ...]
    token_count: int
    """Tokens of prompt and terms."""
    token_budget: int


@frozen(kw_only=True)
class Transcription:
    """The transcript of one audio."""

    text: str
    language: str
    """Code of the language that is spoken."""
    language_probability: float | None
    """Of the detected language; None if it was given."""
    duration_s: float
    segments: tuple[Segment, ...]
    """In order of time; empty only if nothing is said."""
    vocabulary: VocabularyUse | None = None
    num_windows: int = 0
    """Windows that were decoded."""
    num_retries: int = 0
    """Decodings beyond one per window."""

    @property
    def words(self) -> tuple[Word, ...]:
        """The words of all segments; empty if they were not asked for."""
        return tuple(word for segment in self.segments for word in segment.words)
