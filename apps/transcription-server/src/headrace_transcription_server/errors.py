"""Errors of the transcription server.

TranscriptionServerError(Exception)
├── InvalidSetting    a flag, variable or key cannot be used as given (ValueError)
├── UnsafeBinding     the address is reachable from other machines and no API key is set (ValueError)
├── AddressUnusable   the address is taken, forbidden or unknown (OSError)
├── ModelUnavailable  the model cannot be found, fetched or loaded
└── FileProblem       a file cannot be transcribed, or its transcript not written

Each ends the command with exit code 2 and its message as one line.
"""

__all__ = [
    "AddressUnusable",
    "FileProblem",
    "InvalidSetting",
    "ModelUnavailable",
    "TranscriptionServerError",
    "UnsafeBinding",
]


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


class UnsafeBinding(TranscriptionServerError, ValueError):
    """The server would be open to other machines without a key."""

    def __init__(self, host: str) -> None:
        super().__init__(
            f"host {host!r} can be reached from other machines, and no API key is set: add --api-key KEY, "
            f"use --host 127.0.0.1, or pass --insecure to serve everybody"
        )
        self.host = host


class AddressUnusable(TranscriptionServerError, OSError):
    """The server cannot listen where it was told to."""


class ModelUnavailable(TranscriptionServerError):
    """The model cannot be found, fetched or loaded."""


class FileProblem(TranscriptionServerError):
    """A file cannot be transcribed, or its transcript cannot be written."""
