"""What every route group is given."""

import time
from collections.abc import Callable

from attrs import frozen

from headrace_http_api.ports import ModelRegistry

__all__ = ["ApiServices", "ServerInfo"]


@frozen(kw_only=True)
class ServerInfo:
    """Who serves. `started_at` is Unix time in seconds."""

    name: str
    version: str
    started_at: float


@frozen(kw_only=True)
class ApiServices:
    """The models and facts that routes answer from.

    Attributes:
        clock: Unix time in seconds, for `created` and the uptime.
        strict: refuse the fields that nobody knows, instead of naming them in `x-headrace-ignored`.
    """

    models: ModelRegistry
    server: ServerInfo
    clock: Callable[[], float] = time.time
    strict: bool = False
