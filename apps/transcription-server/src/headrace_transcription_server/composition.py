"""From settings to parts that work together: service, routes, page, and a server that listens."""

import socket
import time
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from headrace_http_api import LOOPBACK_HOSTS, ApiConfig, ServerInfo
from headrace_http_api.audio import AudioServices, SessionRegistry, create_audio_app
from headrace_models import ModelError
from headrace_models.audio import AudioLimits
from headrace_models.transcription import BackendLoader, TranscriptionService, WhisperLoader
from headrace_transcription_server.errors import ModelUnavailable
from headrace_transcription_server.http_server import TranscriptionServer
from headrace_transcription_server.listener import bind, bind_unix
from headrace_transcription_server.models import find_model
from headrace_transcription_server.page import with_page
from headrace_transcription_server.settings import TranscriptionSettings, check_binding, is_loopback

__all__ = ["create_transcription_server", "find_loader", "listen", "make_service"]


async def create_transcription_server(
    options: TranscriptionSettings,
    *,
    listener: socket.socket | None = None,
    loader: BackendLoader | None = None,
    model_id: str | None = None,
    transport: Literal["process", "thread"] = "process",
    started_at: float | None = None,
) -> tuple[TranscriptionServer, TranscriptionService]:
    """Make a server that listens, and the service behind it, which closes with it.

    Args:
        options: what the operator asked for.
        listener: a socket that listens already; None binds one as `options` say.
        loader: replaces the loader of the model that `options` name.
        model_id: replaces its name.
        transport: where the model runs.
        started_at: Unix time in seconds of the program's start; None is now.

    Raises:
        UnsafeBinding: other machines could reach it without a key.
        AddressUnusable: it cannot listen there.
        ModelUnavailable: there is no such model; or it was to be loaded first, and cannot be.
    """
    listener = listen(options) if listener is None else listener
    try:
        service = make_service(options, loader=loader, model_id=model_id, transport=transport)
        if options.preload:
            await _preload(service)
    except BaseException:
        listener.close()
        raise
    services = _make_services(options, service, time.time() if started_at is None else started_at)
    app = with_page(create_audio_app(services))
    server = TranscriptionServer(app, listener, service=service, services=services, log_level=options.log_level)
    return server, service


def listen(options: TranscriptionSettings) -> socket.socket:
    """Bind where the options say.

    Raises:
        UnsafeBinding: other machines could reach it without a key.
        AddressUnusable: it cannot listen there.
    """
    check_binding(options)
    return bind(options.host, options.port) if options.unix is None else bind_unix(Path(options.unix).expanduser())


def find_loader(options: TranscriptionSettings) -> tuple[BackendLoader, str]:
    """Find the model that the options name, fetched where needed, and return what loads it, and its name.

    Raises:
        ModelUnavailable: there is no such model.
    """
    source = find_model(options.model)
    return WhisperLoader(source=source, dtype=options.dtype), source.name


def make_service(
    options: TranscriptionSettings,
    *,
    loader: BackendLoader | None = None,
    model_id: str | None = None,
    transport: Literal["process", "thread"] = "process",
) -> TranscriptionService:
    """Make the service that the options describe; nothing is loaded yet.

    Raises:
        ModelUnavailable: there is no such model.
    """
    if loader is None:
        loader, name = find_loader(options)
        model_id = model_id or name
    return TranscriptionService(
        loader,
        model_id=model_id or options.model,
        idle_unload_s=options.residence_s,
        transport=transport,
        max_rows=options.max_rows,
        max_waiting=options.max_queue,
        limits=AudioLimits(max_duration_s=options.max_duration_s),
    )


def _make_services(options: TranscriptionSettings, service: TranscriptionService, started_at: float) -> AudioServices:
    async def transcriber() -> TranscriptionService:
        return service

    is_local = options.unix is None and is_loopback(options.host)
    return AudioServices(
        transcriber=transcriber,
        server=ServerInfo(
            name="headrace-transcribe", version=version("headrace-transcription-server"), started_at=started_at
        ),
        strict=options.strict,
        sessions=SessionRegistry(idle_s=options.session_timeout_s),
        config=ApiConfig(
            api_keys=options.api_keys,
            allowed_origins=options.allowed_origins,
            allowed_hosts=(options.host, *LOOPBACK_HOSTS) if is_local else None,
        ),
    )


async def _preload(service: TranscriptionService) -> None:
    try:
        await service.load()
    except ModelError as error:
        await service.close()
        raise ModelUnavailable(f"{service.model_id!r} cannot be served: {error}") from error
