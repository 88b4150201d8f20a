"""Transcription as a service: `TranscriptionService` loads Whisper when it is needed, and lets it go when it is not.

One module per noun: `service` (what callers see), `take` (one audio on its way), `replies` (what else is waited for),
`requested` (what may be asked for), `stats`, `supervisor` and `workers` (a worker's life), `messages` (what is said to
it), `worker` with `readers` and `hearing` (what it does), `worker_process` (its program), `loader` and `errors`.
Importing this package imports no MLX.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_models.transcription.errors import TranscriberClosed as TranscriberClosed
    from headrace_models.transcription.errors import TranscriptionCancelled as TranscriptionCancelled
    from headrace_models.transcription.errors import TranscriptionError as TranscriptionError
    from headrace_models.transcription.errors import TranscriptionFailed as TranscriptionFailed
    from headrace_models.transcription.errors import TranscriptionQueueFull as TranscriptionQueueFull
    from headrace_models.transcription.errors import TranscriptionUnavailable as TranscriptionUnavailable
    from headrace_models.transcription.loader import WhisperLoader as WhisperLoader
    from headrace_models.transcription.messages import BackendLoader as BackendLoader
    from headrace_models.transcription.messages import Progress as Progress
    from headrace_models.transcription.messages import Samples as Samples
    from headrace_models.transcription.messages import SpeechWanted as SpeechWanted
    from headrace_models.transcription.replies import SpeechStream as SpeechStream
    from headrace_models.transcription.service import TranscriptionService as TranscriptionService
    from headrace_models.transcription.stats import ServiceStats as ServiceStats
    from headrace_models.transcription.take import Take as Take
    from headrace_models.transcription.take import TakeTimings as TakeTimings

__all__ = [
    "BackendLoader",
    "Progress",
    "Samples",
    "ServiceStats",
    "SpeechStream",
    "SpeechWanted",
    "Take",
    "TakeTimings",
    "TranscriberClosed",
    "TranscriptionCancelled",
    "TranscriptionError",
    "TranscriptionFailed",
    "TranscriptionQueueFull",
    "TranscriptionService",
    "TranscriptionUnavailable",
    "WhisperLoader",
]

_MODULES = {
    "BackendLoader": "messages",
    "Progress": "messages",
    "Samples": "messages",
    "ServiceStats": "stats",
    "SpeechStream": "replies",
    "SpeechWanted": "messages",
    "Take": "take",
    "TakeTimings": "take",
    "TranscriberClosed": "errors",
    "TranscriptionCancelled": "errors",
    "TranscriptionError": "errors",
    "TranscriptionFailed": "errors",
    "TranscriptionQueueFull": "errors",
    "TranscriptionService": "service",
    "TranscriptionUnavailable": "errors",
    "WhisperLoader": "loader",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
