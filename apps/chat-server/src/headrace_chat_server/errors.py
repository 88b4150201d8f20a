"""Errors of the chat server.

ChatServerError(Exception)
├── InvalidSetting    a flag, variable or key has a value that cannot be used, or no such setting exists (ValueError)
├── UnsafeBinding     the address is reachable from other machines and no API key is set (ValueError)
├── AddressUnusable   the address is taken, forbidden or unknown (OSError)
├── BatchFileError    a batch file cannot be read or written
└── ModelUnavailable  the model could not be found, fetched or read

Each ends the command with exit code 2 and its message as one line.
"""

__all__ = [
    "AddressUnusable",
    "BatchFileError",
    "ChatServerError",
    "InvalidSetting",
    "ModelUnavailable",
    "UnsafeBinding",
]


class ChatServerError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidSetting(ChatServerError, ValueError):
    """A setting cannot be used as given.

    Attributes:
        origin: where the value came from, such as `flag --port`.
        field: the dotted name of the setting, or the unknown name.
    """

    def __init__(self, message: str, *, origin: str, field: str) -> None:
        super().__init__(message)
        self.origin = origin
        self.field = field


class UnsafeBinding(ChatServerError, ValueError):
    """The server would be open to other machines without a key."""

    def __init__(self, host: str) -> None:
        super().__init__(
            f"host {host!r} can be reached from other machines, and no API key is set: add --api-key KEY, "
            f"use --host 127.0.0.1, or pass --insecure to serve everybody"
        )
        self.host = host


class AddressUnusable(ChatServerError, OSError):
    """The server cannot listen where it was told to."""


class BatchFileError(ChatServerError):
    """A file of requests or answers cannot be used."""


class ModelUnavailable(ChatServerError):
    """The model could not be found, fetched or read."""
