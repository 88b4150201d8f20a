"""Errors of the transcription server.

TranscriptionServerError(Exception)
├── InvalidSetting             a flag, variable or key cannot be used as given (ValueError)
└── TranscriptionUnavailable   this version has no transcription (NotImplementedError)

Each ends the command with exit code 2 and its message as one line.
"""

__all__ = ["InvalidSetting", "TranscriptionServerError", "TranscriptionUnavailable"]


class TranscriptionServerError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidSetting(TranscriptionServerError, ValueError):
    """A setting cannot be used as given.

    Attributes:
        origin: where the value came from, such as `flag --port`.
        field: the name of the setting.
    """

    def __init__(self, message: str, *, origin: str, field: str) -> None:
        super().__init__(message)
        self.origin = origin
        self.field = field


class TranscriptionUnavailable(TranscriptionServerError, NotImplementedError):
    """This version cannot transcribe."""
