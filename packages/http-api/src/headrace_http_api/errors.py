"""Errors of the HTTP API package.

ApiError(Exception)
├── InvalidRequest         client: the body or a field is wrong (ValueError)
│   └── UnsupportedParameter   client: a field that would change the answer and is not served
├── PayloadTooLarge        client: the body is above the limit (ValueError)
├── UnsupportedMediaType   client: the body is of a type that this path does not read (ValueError)
├── SessionClosed          client: the session is over, and takes nothing more (RuntimeError)
├── TooManySessions        client: as many sessions are open as may be; try again later
├── NotAuthenticated       client: no valid API key (PermissionError)
├── Forbidden              client: this origin or host may not call (PermissionError)
├── NotFound               client: nothing has this path or name (LookupError)
│   └── ModelNotFound          client: no model of this name is served
├── ModelUnavailable       server: the model cannot take requests now; try again later
└── ClientDisconnected     client: it left before the answer was ready (ConnectionError)

Which status and body each becomes is told by one table, `headrace_http_api.error_table`.
"""

__all__ = [
    "ApiError",
    "ClientDisconnected",
    "Forbidden",
    "InvalidRequest",
    "ModelNotFound",
    "ModelUnavailable",
    "NotAuthenticated",
    "NotFound",
    "PayloadTooLarge",
    "SessionClosed",
    "TooManySessions",
    "UnsupportedMediaType",
    "UnsupportedParameter",
]


class ApiError(Exception):
    """Base of every error that this package raises on purpose.

    Attributes:
        message: for the client: what, the value, the allowed range, the remedy.
        param: JSON path of the field at fault, such as `messages[0].content`; None when no field is.
        code: overrides the error table's code; None keeps it.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(ApiError, ValueError):
    """The body is not valid JSON, or a field has a wrong type or value."""


class UnsupportedParameter(InvalidRequest):
    """A field asks for something that would change the answer and is not served."""


class PayloadTooLarge(ApiError, ValueError):
    """The request body is above the configured limit."""


class UnsupportedMediaType(ApiError, ValueError):
    """The body's content type is none that this path reads."""


class SessionClosed(ApiError, RuntimeError):
    """The session was finished, deleted, or closed because nothing came for long."""


class TooManySessions(ApiError):
    """As many sessions are open as may be open at a time."""


class NotAuthenticated(ApiError, PermissionError):
    """The request carries no API key, or one that is not known."""


class Forbidden(ApiError, PermissionError):
    """A browser page of this origin, or a request for this host name, may not call the server."""


class NotFound(ApiError, LookupError):
    """Nothing is served under this path or name."""


class ModelNotFound(NotFound):
    """No model of this name is served."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the model {name[:200]!r} is not served here; GET /v1/models lists the names, "
            "and a request without `model` takes the default one",
            param="model",
        )
        self.name = name


class ModelUnavailable(ApiError):
    """The model is loading, restarting or draining and cannot be leased now."""


class ClientDisconnected(ApiError, ConnectionError):
    """The client closed the connection before the answer was ready."""

    def __init__(self) -> None:
        super().__init__("the client closed the connection")
