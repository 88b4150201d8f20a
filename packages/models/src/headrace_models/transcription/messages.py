"""What a service and its worker say to each other: plain picklable data, the same to a thread and to a process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from headrace_models.audio.limits import AudioLimits
    from headrace_models.transcription.errors import ErrorData
    from headrace_models.whisper.backend import WindowBackend
    from headrace_models.whisper.options import TranscribeOptions
    from headrace_models.whisper.results import Segment, Transcription

__all__ = [
    "AudioSource",
    "BackendLoader",
    "CancelTake",
    "Done",
    "DropDetector",
    "Event",
    "Failed",
    "Feed",
    "LoadModel",
    "Loaded",
    "Message",
    "NotLoaded",
    "Probabilities",
    "Progress",
    "Read",
    "ReadAudio",
    "Samples",
    "SpeechWanted",
    "StartTake",
    "Stop",
    "WorkerTimings",
    "WorkerConfig",
    "WorkerSetup",
]

SAMPLE_RATE = 16_000

BackendLoader = Callable[[], "WindowBackend"]
"""Loads the model; picklable, because it is called where the model runs."""


@frozen
class Samples:
    """Samples as bytes: float32, little-endian, 16 kHz, one channel."""

    data: bytes = field(repr=False)

    @property
    def duration_s(self) -> float:
        """How long they last."""
        return len(self.data) / 4 / SAMPLE_RATE


AudioSource = bytes | Path | Samples
"""A file's content, its path, or samples."""


@frozen(kw_only=True)
class SpeechWanted:
    """Look for speech before anything else."""

    threshold: float = 0.5
    min_speech_s: float = 0.25
    is_trimming: bool = False


@frozen(kw_only=True)
class WorkerConfig:
    """What a worker is made of."""

    loader: BackendLoader
    max_rows: int
    limits: AudioLimits


@frozen
class WorkerSetup:
    """What a child process needs before it can unpickle its `WorkerConfig`."""

    sys_path: tuple[str, ...]
    log_level: int


# ---- to the worker -------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class StartTake:
    """Transcribe audio. Answered by `Read`, `Progress` and `Done`, or at any time by `Failed`."""

    request_id: int
    audio: AudioSource
    options: TranscribeOptions
    speech: SpeechWanted | None = None


@frozen
class CancelTake:
    """Drop a take wherever it is; answered by `Failed` without an error, unless it has ended by itself."""

    request_id: int


@frozen(kw_only=True)
class ReadAudio:
    """Read a file's audio. Answered by `Read` with samples, or `Failed`."""

    request_id: int
    audio: AudioSource


@frozen(kw_only=True)
class Feed:
    """Tell how likely there is speech in a stream's next samples. Answered by `Probabilities`, or `Failed`."""

    request_id: int
    detector_id: int
    audio: Samples


@frozen
class DropDetector:
    """A stream is over."""

    detector_id: int


@frozen
class LoadModel:
    """Load the model now. Answered by `Loaded` or `NotLoaded`."""


@frozen
class Stop:
    """End; answered by nothing."""


Message = StartTake | CancelTake | ReadAudio | Feed | DropDetector | LoadModel | Stop


# ---- from the worker -----------------------------------------------------------------------------------------


@frozen
class Loaded:
    """The model is in memory."""

    load_s: float


@frozen
class NotLoaded:
    """The model cannot be loaded; takes that waited for it have failed."""

    error: ErrorData


@frozen(kw_only=True)
class Read:
    """The audio was read; `samples` are there if they were asked for."""

    request_id: int
    samples: Samples | None = None


@frozen(kw_only=True)
class Progress:
    """A take goes on; the first one says that the model has accepted it."""

    request_id: int
    segments: tuple[Segment, ...] = ()
    position_s: float = 0.0
    duration_s: float
    speech_spans: tuple[tuple[float, float], ...] | None = None


@frozen(kw_only=True)
class WorkerTimings:
    """Where a take's time went in the worker, in seconds."""

    load_s: float = 0.0
    queue_s: float = 0.0
    vad_s: float = 0.0
    transcribe_s: float = 0.0


@frozen(kw_only=True)
class Done:
    """A take is over."""

    request_id: int
    result: Transcription
    timings: WorkerTimings


@frozen(kw_only=True)
class Probabilities:
    """Of speech, for the frames that a stream filled."""

    request_id: int
    values: tuple[float, ...]


@frozen(kw_only=True)
class Failed:
    """A take, a reading or a feeding ends without a result; without an error it was cancelled."""

    request_id: int
    error: ErrorData | None


Event = Loaded | NotLoaded | Read | Progress | Done | Probabilities | Failed
