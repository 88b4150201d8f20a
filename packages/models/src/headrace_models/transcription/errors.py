"""Errors of the transcription service, and how errors cross from the process that runs the model.

    ModelError(Exception)
    └── TranscriptionError(RuntimeError)   base of those below
        ├── TranscriptionQueueFull         too many takes wait; try again later
        ├── TranscriptionUnavailable       the model cannot be loaded
        ├── TranscriberClosed              the service takes nothing any more
        ├── TranscriptionCancelled         the take was cancelled, or the service closed while it ran
        └── TranscriptionFailed            the model failed, or the process that ran it has died

Errors of the audio (`headrace_models.audio`) and of options (`headrace_models.whisper`) keep their own types.
"""

from collections.abc import Mapping
from types import MappingProxyType

from attrs import frozen

from headrace_models.audio.errors import (
    AudioDecodeTimeout,
    AudioError,
    AudioTooLarge,
    AudioTooLong,
    AudioTooShort,
    AudioUnreadable,
    VoiceDetectorMissing,
)
from headrace_models.errors import ModelError
from headrace_models.whisper.errors import InvalidTranscribeOption, UnknownLanguage

__all__ = [
    "ErrorData",
    "TranscriberClosed",
    "TranscriptionCancelled",
    "TranscriptionError",
    "TranscriptionFailed",
    "TranscriptionQueueFull",
    "TranscriptionUnavailable",
]


class TranscriptionError(ModelError, RuntimeError):
    """Base of what the service itself raises; the audio and the options are not at fault."""


class TranscriptionQueueFull(TranscriptionError):
    """As many takes wait as may wait; trying again later helps."""


class TranscriptionUnavailable(TranscriptionError):
    """The model cannot be loaded; the message says why."""


class TranscriberClosed(TranscriptionError):
    """The service closes or is closed, and takes nothing any more."""


class TranscriptionCancelled(TranscriptionError):
    """The take was cancelled, or the service closed while it ran."""


class TranscriptionFailed(TranscriptionError):
    """The model failed while this ran, or the process that ran it has died; the next take loads it again."""


_CROSSING: Mapping[str, type[ModelError]] = MappingProxyType(
    {
        cls.__name__: cls
        for cls in (
            AudioDecodeTimeout,
            AudioError,
            AudioTooLarge,
            AudioTooLong,
            AudioTooShort,
            AudioUnreadable,
            InvalidTranscribeOption,
            TranscriptionFailed,
            TranscriptionUnavailable,
            UnknownLanguage,
            VoiceDetectorMissing,
        )
    }
)


@frozen
class ErrorData:
    """An error as plain data: what it was, and its message."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> "ErrorData":
        """Keep the type of errors that are told apart; every other one becomes a `TranscriptionFailed`.

        What an unexpected error says may quote prompts or transcripts of the whole batch: only its type is told.
        """
        for base in type(error).__mro__:
            if _CROSSING.get(base.__name__) is base:
                return cls(base.__name__, str(error))
        return cls(TranscriptionFailed.__name__, f"the model failed ({type(error).__name__}); send it again")

    def make(self) -> ModelError:
        """Return the error, to be raised."""
        return _CROSSING[self.kind](self.message)
