"""What every route group is given."""

import time
from collections.abc import Callable
from typing import Protocol

from attrs import define, field, frozen

from headrace_http_api.config import ApiConfig
from headrace_http_api.ports import ModelRegistry

__all__ = ["ApiServices", "ServerInfo", "StreamCounts", "StreamServices"]


@frozen(kw_only=True)
class ServerInfo:
    """Who serves. `started_at` is Unix time in seconds."""

    name: str
    version: str
    started_at: float


@define
class StreamCounts:
    """The event streams of a server.

    Attributes:
        num_open: streams now.
        num_left: total of those whose client closed the connection before their end.
        num_dropped: total of those that were cut because their client did not read.
    """

    num_open: int = 0
    num_left: int = 0
    num_dropped: int = 0


class StreamServices(Protocol):
    """What an event stream needs of the services of its routes."""

    @property
    def config(self) -> ApiConfig: ...
    @property
    def streams(self) -> StreamCounts: ...


@frozen(kw_only=True)
class ApiServices:
    """The models and facts that routes answer from.

    Attributes:
        clock: Unix time in seconds, for `created` and the uptime.
        strict: refuse the fields that nobody knows, instead of naming them in `x-headrace-ignored`.
        config: limits; `create_app` puts its own here.
        streams: counts that the routes keep.
    """

    models: ModelRegistry
    server: ServerInfo
    clock: Callable[[], float] = time.time
    strict: bool = False
    config: ApiConfig = field(factory=ApiConfig)
    streams: StreamCounts = field(factory=StreamCounts)
