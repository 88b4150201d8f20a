"""The command `headrace-transcribe [MODEL]`: bind, and serve until a signal comes."""

import asyncio
import logging
import shlex
import socket
import sys
import time
from typing import TYPE_CHECKING

from headrace_transcription_server.models import require_backend
from headrace_transcription_server.settings import TranscriptionSettings
from headrace_transcription_server.stop_signals import StopSignals, stop_signals

if TYPE_CHECKING:
    from headrace_models.transcription import BackendLoader
    from headrace_transcription_server.http_server import TranscriptionServer

__all__ = ["run_serve"]


def run_serve(settings: TranscriptionSettings) -> int:
    """Serve until a signal comes; return the exit code.

    Raises:
        TranscriptionServerError: when the server cannot start.
    """
    from headrace_transcription_server.composition import find_loader, listen

    started_at = time.time()
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    listener = listen(settings)
    with listener:
        require_backend()
        # Before the loop owns the signals: fetching a model takes minutes, and Ctrl-C ends it.
        loader, model_id = find_loader(settings)
        return asyncio.run(_serve(settings, listener, loader, model_id, started_at))


async def _serve(
    settings: TranscriptionSettings, listener: socket.socket, loader: "BackendLoader", model_id: str, started_at: float
) -> int:
    from headrace_transcription_server.composition import create_transcription_server

    with stop_signals() as signals:
        server, service = await create_transcription_server(
            settings, listener=listener, loader=loader, model_id=model_id, started_at=started_at
        )
        try:
            _announce(service.model_id, server.url)
            await _until_stopped(server, signals, settings.drain_timeout_s)
        finally:
            await server.close()
    return 0


async def _until_stopped(server: "TranscriptionServer", signals: StopSignals, drain_timeout_s: float) -> None:
    stopped = asyncio.create_task(signals.first.wait())
    ended = asyncio.create_task(server.wait())
    await asyncio.wait({stopped, ended}, return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    if not stopped.done():
        stopped.cancel()
        return
    drained = asyncio.create_task(server.drain(drain_timeout_s))
    cut_short = asyncio.create_task(signals.second.wait())
    _, left = await asyncio.wait({drained, cut_short}, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()


def _announce(model: str, url: str) -> None:
    is_unix = url.startswith("unix:")
    where = f"--unix-socket {shlex.quote(url[5:])} http://localhost" if is_unix else url
    page = "" if is_unix else f"; its page: {url}/"
    sys.stdout.write(f"Headrace transcribes with {model} on {url}{page}\n")
    sys.stdout.write(f"curl {where}/v1/audio/transcriptions -F file=@speech.mp3 -F model={shlex.quote(model)}\n")
    sys.stdout.flush()
