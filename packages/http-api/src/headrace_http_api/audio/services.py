"""What the audio routes are given."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from attrs import field, frozen

from headrace_http_api.audio.registry import SessionRegistry
from headrace_http_api.config import ApiConfig
from headrace_http_api.services import StreamCounts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace_http_api.audio_ports import Transcriber
    from headrace_http_api.services import ServerInfo

__all__ = ["AudioServices"]


@frozen(kw_only=True)
class AudioServices:
    """The transcription service, and the facts that routes answer from.

    Attributes:
        transcriber: gives the service, made when it is first asked for; raises `ModelUnavailable` if there is none.
        clock: Unix time in seconds.
        strict: refuse the fields that nobody knows, instead of naming them in `x-headrace-ignored`.
        sessions: those that are open.
        config: limits; those that the application was made with.
        streams: counts that the routes keep.
    """

    transcriber: Callable[[], Awaitable[Transcriber]]
    server: ServerInfo
    clock: Callable[[], float] = time.time
    strict: bool = False
    sessions: SessionRegistry = field(factory=SessionRegistry)
    config: ApiConfig = field(factory=ApiConfig)
    streams: StreamCounts = field(factory=StreamCounts)
