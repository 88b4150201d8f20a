"""The command `headrace serve`: bind, start the engine, then load the HTTP side while the model loads."""

import asyncio
import logging
import socket
import time
from typing import TYPE_CHECKING

from headrace_chat_server.composition import Composition, compose
from headrace_chat_server.console import announce, announce_loading
from headrace_chat_server.errors import ChatServerError
from headrace_chat_server.listener import bind, url_of
from headrace_chat_server.models import find_model
from headrace_chat_server.settings import Settings, check_binding

if TYPE_CHECKING:
    from headrace_chat_server.http_server import HttpServer
    from headrace_models import ModelSource


def run_serve(settings: Settings) -> int:
    """Serve until a signal comes; return the exit code.

    Raises:
        ChatServerError: when the server cannot start.
    """
    started_at = time.time()
    logging.basicConfig(
        level=settings.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    check_binding(settings.server)
    with bind(settings.server.host, settings.server.port) as listener:
        source = find_model(settings.model)
        return asyncio.run(_serve(settings, listener, source, started_at))


async def _serve(settings: Settings, listener: socket.socket, source: "ModelSource", started_at: float) -> int:
    composition = compose(settings, source, started_at=started_at)
    try:
        # The engine's process loads the weights while this one imports the HTTP libraries.
        await composition.start()
        announce_loading(source.name, url_of(listener))
        from headrace_chat_server.http_server import HttpServer

        server = HttpServer(
            composition.make_app(),
            gateway=composition.gateway,
            drain_timeout_s=settings.server.drain_timeout_s,
            log_level=settings.server.log_level,
        )
        announcement = asyncio.create_task(_announce(composition, server, url_of(listener)))
        try:
            await server.run(listener)
        finally:
            announcement.cancel()
            await asyncio.gather(announcement, return_exceptions=True)
        if announcement.done() and not announcement.cancelled():
            announcement.result()
        return 0
    finally:
        await composition.close()


async def _announce(composition: Composition, server: "HttpServer", url: str) -> None:
    """Tell the person that the server is ready; stop the server when it will never be."""
    try:
        await composition.wait_ready()
    except ChatServerError:
        if server.is_stopping:
            # The engine was stopped while it loaded, as asked.
            return
        server.stop()
        raise
    announce(composition.registry.name, url)
