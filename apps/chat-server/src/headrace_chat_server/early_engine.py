"""The engine's process, started first of all: it imports MLX while this one reads settings and finds the model."""

from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace_chat_server.engine_loader import warm_up
from headrace_chat_server.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Generator

    from headrace_scheduling.spawning import SpawnedProcess

__all__ = ["early_engine"]


@contextmanager
def early_engine(settings: Settings) -> "Generator[SpawnedProcess | None]":
    """Start a process that warms up, where the transport needs one; whatever happens, it is gone afterwards."""
    if settings.engine.transport != "process":
        yield None
        return
    from headrace_scheduling.spawning import spawn

    spawned = spawn(warm_up, log_level=settings.server.log_level.upper())
    try:
        yield spawned
    finally:
        spawned.discard()
