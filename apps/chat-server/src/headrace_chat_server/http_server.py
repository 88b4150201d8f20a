"""uvicorn on a socket that is already bound, with a drain that finishes what runs before the port closes."""

import asyncio
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from headrace_scheduling import GenerationGateway

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _UnsignalledServer(uvicorn.Server):
    """uvicorn without its own signal handlers, which end the process with the signal instead of exit code 0."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """Runs an application until a signal, then drains.

    The first signal closes admission (requests get a 503, `/ready` says so) and waits for running generations; the
    second, or the end of the timeout, cuts what is left.
    """

    def __init__(
        self, app: "Starlette", *, gateway: "GenerationGateway", drain_timeout_s: float, log_level: str
    ) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level=log_level,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=1,
            ws="none",
        )
        self._server = _UnsignalledServer(config)
        self._gateway = gateway
        self._drain_timeout_s = drain_timeout_s
        self._drain: asyncio.Task[None] | None = None

    async def run(self, listener: socket.socket) -> None:
        """Serve on the socket until stopped; owns SIGINT and SIGTERM meanwhile."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        try:
            await self._server.serve(sockets=[listener])
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
            if self._drain is not None:
                self._drain.cancel()
                await asyncio.gather(self._drain, return_exceptions=True)

    @property
    def is_stopping(self) -> bool:
        """Whether a signal or `stop` came."""
        return self._drain is not None or self._server.should_exit

    def stop(self) -> None:
        """Close the port and end open connections at once."""
        self._server.should_exit = True
        self._server.force_exit = True

    def _on_signal(self) -> None:
        if self._drain is None:
            self._drain = asyncio.create_task(self._drain_then_exit())
        else:
            self.stop()

    async def _drain_then_exit(self) -> None:
        try:
            await self._gateway.drain(self._drain_timeout_s)
        finally:
            self._server.should_exit = True
