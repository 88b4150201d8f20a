"""From settings to parts that work together: engine port, gateway, registry and application."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define, field

from headrace_chat_server.engine_loader import EngineLoader
from headrace_chat_server.errors import ModelUnavailable
from headrace_chat_server.fit import ServingLimits, kv_scheme
from headrace_chat_server.grammars import compile_grammar
from headrace_chat_server.registry import SingleModelRegistry
from headrace_chat_server.settings import EngineSettings, Settings, is_loopback
from headrace_chat_server.text_side import TextSide, load_text_side
from headrace_chat_server.transcription import Transcription
from headrace_scheduling import EngineConfig, GenerationGateway, SchedulingError

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from headrace_models import ModelSource
    from headrace_scheduling.ports import EnginePort, ModelLoader
    from headrace_scheduling.spawning import SpawnedProcess

__all__ = ["Composition", "compose", "make_port"]

_STOP_TIMEOUT_S = 10.0
# Time to write all stored prompts to a slow disk; a second Ctrl-C ends it.
_SAVING_TIMEOUT_S = 120.0
_AT_ONCE_S = 1.0
# More would cut prompts so short that their products lose what the streams win.
_MAX_PREFILL_STREAMS = 2


@define(kw_only=True)
class Composition:
    """A server's parts. Start it, take the application, and close it at the end.

    Nothing but the engine's own process is started by `start`, so that it can load while the caller imports the
    HTTP libraries.
    """

    settings: Settings
    gateway: GenerationGateway
    registry: SingleModelRegistry
    started_at: float
    transcription: Transcription | None = None
    _load_text_side: Callable[[], TextSide] = field(alias="load_text_side")

    async def start(self) -> None:
        """Start the engine; return before the model is loaded."""
        await self.gateway.start()

    async def wait_ready(self) -> None:
        """Load the codec and wait for the engine.

        Raises:
            ModelUnavailable: when either cannot be loaded.
        """
        from headrace_models import ModelError

        try:
            self.registry.provide(await asyncio.to_thread(self._load_text_side))
            await self.gateway.wait_ready()
        except (ModelError, SchedulingError) as error:
            raise ModelUnavailable(f"the model {self.registry.name!r} cannot be served: {error}") from error

    def make_app(self) -> "Starlette":
        """Make the application; imports the HTTP libraries."""
        from importlib.metadata import version

        from headrace_http_api import LOOPBACK_HOSTS, ApiConfig, ApiServices, ServerInfo, create_app
        from headrace_http_api.app import chat_groups

        server = self.settings.server
        services = ApiServices(
            models=self.registry,
            server=ServerInfo(name="headrace", version=version("headrace-chat-server"), started_at=self.started_at),
            strict=server.strict,
        )
        config = ApiConfig(
            api_keys=server.api_keys,
            allowed_origins=server.allowed_origins,
            allowed_hosts=(server.host, *LOOPBACK_HOSTS) if is_loopback(server.host) else None,
            keep_alive_s=server.keep_alive_s,
            stall_timeout_s=server.stall_timeout_s,
            max_unread_tokens=server.max_unread_tokens,
        )
        groups = [*chat_groups(), *([] if self.transcription is None else [self.transcription.routes])]
        return create_app(services, config, groups=groups)

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing more, and wait for what runs; whether all of it ended in time."""
        parts = [self.gateway, *([] if self.transcription is None else [self.transcription])]
        return all(await asyncio.gather(*(part.drain(timeout_s) for part in parts)))

    async def close(self, *, at_once: bool = False) -> None:
        """End what runs and stop the engine, which saves its stored prompts if a folder is set. Idempotent.

        Args:
            at_once: end the engine as it stands after a second.
        """
        if self.transcription is not None:
            await self.transcription.close()
        await self.gateway.close(_AT_ONCE_S if at_once else None)


def compose(
    settings: Settings,
    source: "ModelSource",
    *,
    loader: "ModelLoader | None" = None,
    load_text: Callable[[], TextSide] | None = None,
    started_at: float | None = None,
    limits: ServingLimits | None = None,
    transcription: Transcription | None = None,
    engine: "SpawnedProcess | None" = None,
) -> Composition:
    """Put the parts together without starting or loading any.

    Args:
        settings: what the operator asked for.
        source: the model's files.
        loader: replaces the loader of the engine; must be picklable for a child process.
        load_text: replaces the loading of codec and sampling defaults.
        started_at: Unix time in seconds of the program's start; None is now.
        limits: what the machine's memory allows; None leaves it to the model and the settings.
        transcription: serves audio too; closed with the rest.
        engine: a process for the engine that was started before.
    """
    started_at = time.time() if started_at is None else started_at
    if loader is None:
        loader = EngineLoader(name=source.name, path=source.path, format=source.format, dtype=settings.engine.dtype)
    port = make_port(settings.engine, loader, source.path, limits, engine)
    gateway = GenerationGateway(port, max_outstanding=settings.engine.max_queue)
    registry = SingleModelRegistry(
        name=source.name,
        created=int(started_at),
        gateway=gateway,
        max_tokens=settings.engine.max_tokens,
    )
    return Composition(
        settings=settings,
        gateway=gateway,
        registry=registry,
        started_at=started_at,
        transcription=transcription,
        load_text_side=load_text or (lambda: load_text_side(source, settings.sampling, settings.chat_template)),
    )


def make_port(
    settings: EngineSettings,
    loader: "ModelLoader",
    model_path: Path | None = None,
    limits: ServingLimits | None = None,
    first: "SpawnedProcess | None" = None,
) -> "EnginePort":
    """Make the engine's port over the transport that the settings name; nothing starts yet.

    Args:
        model_path: folder or file of the model, where `kv` "config" looks for `kv_config.json`.
        limits: what the machine's memory allows.
        first: a process that was started before, for the transport "process".

    Raises:
        ModelUnavailable: the KV scheme cannot be used.
    """
    from headrace_models import share_blas

    folder = None if settings.prompt_cache_dir is None else Path(settings.prompt_cache_dir).expanduser()
    config = EngineConfig(
        loader=loader,
        compile_grammar=compile_grammar,
        max_rows=settings.max_rows,
        prefill_chunk=settings.prefill_chunk,
        kv_scheme=kv_scheme(settings.kv, model_path),
        max_context=None if limits is None else limits.max_context,
        kv_budget_bytes=settings.kv_budget if limits is None else limits.kv_budget_bytes,
        slot_bytes=None if limits is None else limits.slot_bytes,
        prompt_cache_bytes=settings.prompt_cache if limits is None else limits.prompt_cache_bytes,
        prompt_cache_dir=folder,
        stop_timeout_s=_STOP_TIMEOUT_S if folder is None else _SAVING_TIMEOUT_S,
        prefill_streams=min(_MAX_PREFILL_STREAMS, os.cpu_count() or 1),
        share_blas=share_blas,
    )
    if settings.transport == "thread":
        from headrace_scheduling.thread_port import ThreadEnginePort

        return ThreadEnginePort(config)
    from headrace_scheduling.process_port import ProcessEnginePort

    return ProcessEnginePort(config, first=first)
