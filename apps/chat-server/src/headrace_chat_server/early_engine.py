"""The engine's process, started first of all: it imports MLX while this one reads settings and finds the model."""

from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from headrace_chat_server.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Generator

    from headrace_scheduling.spawning import SpawnedProcess

__all__ = ["early_engine", "warm_up"]

# What the loader calls and what runs steps.
_NEEDED = (
    "headrace_chat_server.engine_loader",
    "headrace_http_api.parsing.selection",
    "headrace_models.loading",
    "headrace_models.building",
    "headrace_models.weights",
    "headrace_scheduling.runner",
    "tokenizers",
)


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


def warm_up() -> None:
    """Import what loading and running a model takes, after a fast BLAS; runs in the engine's process."""
    from headrace_models import enable_fast_blas, interleave_streams

    # Only before the first import of mlx can its BLAS symbols be replaced.
    enable_fast_blas()
    interleave_streams()
    for name in _NEEDED:
        import_module(name)
