"""What the audio routes ask of a transcription service, as protocols fitted by shape, and what they hand to it.

Audio is a file's content or path, or `Pcm`; times are seconds from the beginning of the audio that was handed over.
Errors that a service raises are told by the error table under these names, of the root package `headrace_models`:

    AudioError and its subclasses                     the audio is at fault: 400; AudioTooLarge: 413
    InvalidTranscribeOption, UnknownLanguage          the model cannot do what the options say: 400
    VoiceDetectorMissing                              speech is to be found, and nothing is there that finds it: 400
    TranscriptionError                                base of those below
    ├── TranscriptionQueueFull                        429
    ├── TranscriptionUnavailable                      503: the model cannot be loaded now
    ├── TranscriberClosed                             503: the service closes
    ├── TranscriptionCancelled                        503: unloaded or closed while it ran
    └── TranscriptionFailed                           500: the model failed, or the process that ran it has died
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

__all__ = [
    "DEFAULT_TEMPERATURES",
    "FRAME_SAMPLES",
    "SAMPLE_RATE",
    "Pcm",
    "Progress",
    "Samples",
    "SpeechDetector",
    "SpeechFilter",
    "Take",
    "TakeTimings",
    "TimedSegment",
    "TimedWord",
    "Transcriber",
    "TranscriberStats",
    "Transcript",
    "TranscriptionOptions",
    "VocabularyUse",
]

SAMPLE_RATE = 16_000
FRAME_SAMPLES = 512
DEFAULT_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


# ---- what the routes hand over -------------------------------------------------------------------------------


@frozen
class Pcm:
    """Samples as they are.

    Attributes:
        data: float32, little-endian, 16 kHz, one channel, about -1 to 1; four bytes for each sample.
    """

    data: bytes = field(repr=False)

    @property
    def duration_s(self) -> float:
        """How long it lasts."""
        return len(self.data) / 4 / SAMPLE_RATE


class Samples(Protocol):
    """Samples that a service has read, of the form that `Pcm` has."""

    @property
    def data(self) -> bytes: ...


@frozen(kw_only=True)
class SpeechFilter:
    """Look for speech first: without any, the text is empty and the model is not even loaded.

    Attributes:
        threshold: probability from which a frame is speech, between 0 and 1.
        min_speech_s: shorter stretches are no speech.
        is_trimming: transcribe only from half a second before the first speech to half a second after the last;
            times still count from the beginning of the whole audio.
    """

    threshold: float = 0.5
    min_speech_s: float = 0.25
    is_trimming: bool = False


@frozen(kw_only=True)
class TranscriptionOptions:
    """How audio is transcribed. Names, meanings and defaults are those of `headrace_models.whisper.TranscribeOptions`.

    Attributes:
        language: code or name; None has it detected.
        temperature: tried in turn until a window succeeds.
        prompt: text as if it came before the audio.
        vocabulary: terms that may be said; as many as fit follow the prompt.
        audio_context: positions of 20 ms per window, 64 to 1500; None takes the model's.
        draft: tokens of an earlier transcript of this audio or of its beginning; they only save time.
        open_end: the audio may end in the middle of a sentence: what is said last is kept as it is, not heard again.
        speech: look for speech first; None does not.
    """

    task: Literal["transcribe", "translate"] = "transcribe"
    language: str | None = None
    prompt: str | None = field(default=None, repr=False)
    vocabulary: tuple[str, ...] = field(default=(), repr=False)
    temperature: tuple[float, ...] = DEFAULT_TEMPERATURES
    beam_size: int | None = None
    condition_on_previous_text: bool = True
    no_speech_threshold: float | None = 0.6
    word_timestamps: bool = False
    without_timestamps: bool = False
    repetition_guard: bool = True
    audio_context: int | None = None
    draft: tuple[int, ...] = field(default=(), repr=False)
    open_end: bool = False
    speech: SpeechFilter | None = None


# ---- what a service gives ------------------------------------------------------------------------------------


class TimedWord(Protocol):
    """A word, with the space before it and the punctuation around it."""

    @property
    def text(self) -> str: ...
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...
    @property
    def probability(self) -> float: ...


class TimedSegment(Protocol):
    """A stretch of speech; its words are there if they were asked for."""

    @property
    def text(self) -> str: ...
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def temperature(self) -> float: ...
    @property
    def avg_logprob(self) -> float: ...
    @property
    def compression_ratio(self) -> float: ...
    @property
    def no_speech_prob(self) -> float: ...
    @property
    def words(self) -> Sequence[TimedWord]: ...


class VocabularyUse(Protocol):
    """Which terms of a vocabulary found room in the prompt."""

    @property
    def included(self) -> Sequence[str]: ...
    @property
    def omitted(self) -> Sequence[str]: ...
    @property
    def token_count(self) -> int: ...
    @property
    def token_budget(self) -> int: ...


class Transcript(Protocol):
    """A whole transcript; no segments if nothing is said."""

    @property
    def text(self) -> str: ...
    @property
    def language(self) -> str:
        """Return the code of the language that is spoken; empty if no speech was found and none was given."""
        ...

    @property
    def duration_s(self) -> float: ...
    @property
    def segments(self) -> Sequence[TimedSegment]: ...
    @property
    def vocabulary(self) -> VocabularyUse | None: ...


class TakeTimings(Protocol):
    """Where the time of one take went, in seconds; `load_s` is 0 if the model was there."""

    @property
    def load_s(self) -> float: ...
    @property
    def queue_s(self) -> float: ...
    @property
    def vad_s(self) -> float: ...
    @property
    def transcribe_s(self) -> float: ...
    @property
    def total_s(self) -> float: ...


class Progress(Protocol):
    """How far a take has come."""

    @property
    def segments(self) -> Sequence[TimedSegment]:
        """Return the new ones: final, in order of time."""
        ...

    @property
    def position_s(self) -> float: ...
    @property
    def duration_s(self) -> float: ...


class Take(Protocol):
    """One audio that is being transcribed: an async iterator of its progress, then the transcript.

    The first progress comes when the model has accepted the options, at the position 0 if nothing is decoded yet: what
    is wrong with them is raised from there. Each segment comes once. Cancelling the task that iterates cancels nothing
    by itself: `aclose` does.
    """

    def __aiter__(self) -> AsyncIterator[Progress]: ...

    @property
    def transcript(self) -> Transcript:
        """Return the whole transcript; valid once the iteration is over."""
        ...

    @property
    def timings(self) -> TakeTimings:
        """Return where the time went; valid once the iteration is over."""
        ...

    @property
    def speech_spans(self) -> Sequence[tuple[float, float]] | None:
        """Return where somebody speaks, from the first progress on; None if that was not asked for."""
        ...

    async def aclose(self) -> None:
        """Cancel it wherever it is, and wait until nothing more is computed for it; harmless once it is over."""
        ...


class SpeechDetector(Protocol):
    """Tells, frame by frame of 512 samples, how likely somebody speaks; remembers what it has heard."""

    async def feed(self, pcm: Pcm, /) -> Sequence[float]:
        """Return the probabilities of the frames that are full now; the rest waits for the next piece."""
        ...


class TranscriberStats(Protocol):
    """Counts of the service, as last published; reading them waits for nothing."""

    @property
    def is_resident(self) -> bool:
        """Whether the model is in memory."""
        ...

    @property
    def num_loads(self) -> int: ...
    @property
    def num_unloads(self) -> int: ...
    @property
    def num_requests(self) -> int:
        """Return how many takes were submitted."""
        ...

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_failed(self) -> int: ...
    @property
    def num_cancelled(self) -> int: ...
    @property
    def last_load_s(self) -> float | None: ...
    @property
    def idle_unload_s(self) -> float | None:
        """Return after how long without work it is unloaded; None if never."""
        ...


class Transcriber(Protocol):
    """A transcription service with one model, which it loads when it is needed. For one event loop."""

    @property
    def model_id(self) -> str: ...

    def stats(self) -> TranscriberStats: ...

    def check(self, options: TranscriptionOptions, /) -> None:
        """Refuse options that no model takes, before there is any audio.

        Raises:
            InvalidTranscribeOption, UnknownLanguage: names the field.
        """
        ...

    async def submit(self, audio: bytes | Path | Pcm, options: TranscriptionOptions, /) -> Take:
        """Read the audio and queue it. A file at a path is not read after this returns.

        Cancelling this call leaves nothing behind.

        Raises:
            Errors of the audio, a full queue, and a service that closes.
        """
        ...

    async def read(self, audio: bytes | Path, /) -> Samples:
        """Read a file's audio as 16 kHz mono; it may be shorter than what can be transcribed.

        Raises:
            Errors of the audio.
        """
        ...

    def new_speech_detector(self) -> SpeechDetector:
        """Make one for one stream of audio.

        Raises:
            VoiceDetectorMissing: nothing is installed that finds speech.
        """
        ...

    def hold(self) -> AbstractContextManager[None]:
        """Keep the model from being unloaded while a session is open, once something has loaded it.

        Raises:
            TranscriberClosed: on entering.
        """
        ...

    async def unload(self) -> bool:
        """Unload the model; False, and nothing happens, if none is loaded, or takes run or sessions are open."""
        ...
