"""uvicorn on a socket that is already bound, with an end that lets running transcriptions finish."""

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace_http_api.audio import AudioServices
from headrace_http_api.outlet import ABORT_KEY
from headrace_models.transcription import TranscriptionService
from headrace_transcription_server.listener import remove_path, url_of

__all__ = ["TranscriptionServer"]

_LAST_BYTES_TIMEOUT_S = 1
# A minute of samples, which a live session may send at once after a pause of the network.
_MAX_MESSAGE_BYTES = 4 * 1024 * 1024


class _AbortingProtocol(H11Protocol):
    """Lets routes cut a connection whose client does not read: to close it would wait for that client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, ABORT_KEY: transport.abort}


class _UnsignalledServer(uvicorn.Server):
    """uvicorn without its own signal handlers: what signals mean is for the program to say."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class TranscriptionServer:
    """Serves an application on a socket that listens, from the moment it is made. For one event loop.

    Args:
        app: the ASGI application.
        listener: bound and listening; closed at the end.
        service: closed at the end.
        services: whose sessions are closed at the end.
        log_level: least level that uvicorn logs.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        service: TranscriptionService,
        services: AudioServices,
        log_level: str,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=_AbortingProtocol,
            ws="websockets-sansio",
            ws_max_size=_MAX_MESSAGE_BYTES,
            log_config=None,
            log_level=log_level,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_LAST_BYTES_TIMEOUT_S,
        )
        self._service, self._services = service, services
        self._server = _UnsignalledServer(config)
        self._url = url_of(listener)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))

    @property
    def url(self) -> str:
        """Where this machine reaches it: `http://HOST:PORT`, or `unix:PATH`."""
        return self._url

    async def wait(self) -> None:
        """Wait until it has ended."""
        await asyncio.shield(self._task)

    async def drain(self, timeout_s: float) -> bool:
        """Take no more audio, and let what runs finish; whether all of it did in time."""
        return await self._service.drain(timeout_s)

    async def close(self) -> None:
        """End sessions and what still runs, the port, and the service with its model. Idempotent."""
        self._services.sessions.close_all()
        await self._service.close()
        self._server.should_exit = True
        await asyncio.wait({self._task})
        remove_path(self._url)
