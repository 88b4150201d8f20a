"""The command `headrace serve`: bind, start the engine, then load the HTTP side while the model loads."""

import asyncio
import logging
import socket
import time
from typing import TYPE_CHECKING

import uvloop

from headrace_chat_server.composition import Composition, compose
from headrace_chat_server.console import announce, announce_loading, announce_saving
from headrace_chat_server.fit import ServingLimits, check_fit
from headrace_chat_server.listener import bind, url_of
from headrace_chat_server.models import find_model, require_backend
from headrace_chat_server.prompt_folder import check_prompt_folder
from headrace_chat_server.settings import Settings, check_binding
from headrace_chat_server.stop_signals import StopSignals, stop_signals
from headrace_chat_server.transcription import make_transcription

if TYPE_CHECKING:
    from headrace_models import ModelSource
    from headrace_scheduling.spawning import SpawnedProcess


def run_serve(settings: Settings, engine: "SpawnedProcess | None" = None) -> int:
    """Serve until a signal comes; return the exit code.

    Args:
        settings: what the operator asked for.
        engine: a process for the engine that was started before.

    Raises:
        ChatServerError: when the server cannot start.
    """
    started_at = time.time()
    logging.basicConfig(
        level=settings.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    check_binding(settings.server)
    check_prompt_folder(settings.engine)
    with bind(settings.server.host, settings.server.port) as listener:
        require_backend()
        source = find_model(settings.model)
        limits = check_fit(settings.engine, source)
        # A streamed token costs the process less than on asyncio's own loop.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings, listener, source, started_at, limits, engine))


async def _serve(
    settings: Settings,
    listener: socket.socket,
    source: "ModelSource",
    started_at: float,
    limits: ServingLimits | None,
    engine: "SpawnedProcess | None",
) -> int:
    composition = compose(
        settings,
        source,
        started_at=started_at,
        limits=limits,
        transcription=make_transcription(settings.whisper),
        engine=engine,
    )
    url = url_of(listener)
    with stop_signals() as signals:
        try:
            # The engine's process loads the weights while this one imports the HTTP libraries.
            await composition.start()
            announce_loading(source.name, url)
            await _serve_http(composition, listener, signals, url)
        finally:
            await _close(composition, signals)
    return 0


async def _close(composition: Composition, signals: StopSignals) -> None:
    """Stop the engine in order, which may take the time to store prompts; a second signal ends it as it stands."""
    folder = composition.settings.engine.prompt_cache_dir
    if folder is None:
        await composition.close()
        return
    if not signals.second.is_set():
        announce_saving(folder)
    closed = asyncio.create_task(composition.close())
    cut_short = asyncio.create_task(signals.second.wait())
    await asyncio.wait({closed, cut_short}, return_when=asyncio.FIRST_COMPLETED)
    cut_short.cancel()
    if not closed.done():
        await composition.close(at_once=True)
    await closed


async def _serve_http(composition: Composition, listener: socket.socket, signals: StopSignals, url: str) -> None:
    from headrace_chat_server.http_server import HttpServer

    settings = composition.settings.server
    server = HttpServer(
        composition.make_app(),
        gateway=composition,
        signals=signals,
        drain_timeout_s=settings.drain_timeout_s,
        log_level=settings.log_level,
        has_websockets=composition.transcription is not None,
    )
    announcement = asyncio.create_task(_announce_ready(composition, url))
    # A model that cannot be loaded ends the server; its reason is raised below.
    announcement.add_done_callback(lambda done: server.stop() if _has_failed(done) else None)
    try:
        await server.run(listener)
    finally:
        announcement.cancel()
        await asyncio.wait({announcement})
    if _has_failed(announcement) and not signals.first.is_set():
        announcement.result()


async def _announce_ready(composition: Composition, url: str) -> None:
    await composition.wait_ready()
    announce(composition.registry.name, url)


def _has_failed(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and task.exception() is not None
