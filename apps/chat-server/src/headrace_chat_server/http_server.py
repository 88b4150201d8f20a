"""uvicorn on a socket that is already bound, with a drain that finishes what runs before the port closes."""

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace_chat_server.stop_signals import StopSignals
from headrace_http_api.outlet import ABORT_KEY

if TYPE_CHECKING:
    from starlette.applications import Starlette

_LAST_BYTES_TIMEOUT_S = 1
# Of a request's line and header fields, beyond the first read; browsers and proxies stop far below it.
_MAX_HEAD_BYTES = 64 * 1024


class Drainable(Protocol):
    """What runs behind the application."""

    async def drain(self, timeout_s: float, /) -> bool: ...

    async def close(self) -> None: ...


class _BoundedProtocol(HttpToolsProtocol):
    """Refuses a head without end, which the parser would gather, and lets routes cut a connection.

    They cut it where a client does not read: to close the connection would wait for that client.
    """

    _is_in_head = False
    _num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, ABORT_KEY: transport.abort}

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        super().data_received(data)
        if was_in_head and self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                self.send_400_response(f"the request's head is longer than {_MAX_HEAD_BYTES} bytes; send less")

    def on_message_begin(self) -> None:
        self._is_in_head, self._num_head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()


class _UnsignalledServer(uvicorn.Server):
    """uvicorn without its own signal handlers, which end the process with the signal instead of exit code 0."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """Runs an application until a signal, then drains.

    The first signal closes admission (requests get a 503, `/ready` says so) and waits for running generations; at
    the end of the timeout they end as cancelled. The second signal cuts what is left.
    """

    def __init__(
        self,
        app: "Starlette",
        *,
        gateway: Drainable,
        signals: StopSignals,
        drain_timeout_s: float,
        log_level: str,
        has_websockets: bool = False,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=_BoundedProtocol,
            log_config=None,
            log_level=log_level,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_LAST_BYTES_TIMEOUT_S,
            ws="websockets-sansio" if has_websockets else "none",
        )
        self._server = _UnsignalledServer(config)
        self._gateway = gateway
        self._signals = signals
        self._drain_timeout_s = drain_timeout_s

    async def run(self, listener: socket.socket) -> None:
        """Serve on the socket until a signal or `stop`."""
        drain = asyncio.create_task(self._drain_on_signal())
        try:
            await self._server.serve(sockets=[listener])
        finally:
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)

    def stop(self) -> None:
        """Close the port and end open connections at once."""
        self._server.should_exit = True
        self._server.force_exit = True

    async def _drain_on_signal(self) -> None:
        await self._signals.first.wait()
        drained = asyncio.create_task(self._end_generations())
        cut_short = asyncio.create_task(self._signals.second.wait())
        try:
            await asyncio.wait({drained, cut_short}, return_when=asyncio.FIRST_COMPLETED)
            self._server.should_exit = True
            await cut_short
            self.stop()
        finally:
            drained.cancel()
            cut_short.cancel()

    async def _end_generations(self) -> None:
        """Let what runs finish; what outlives the timeout ends with an error that its client can read."""
        if not await self._gateway.drain(self._drain_timeout_s):
            await self._gateway.close()
