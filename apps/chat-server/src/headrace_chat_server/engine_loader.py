"""What the engine's process calls to load the model."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attrs import frozen

from headrace_chat_server.settings import Dtype

if TYPE_CHECKING:
    from headrace_models import Codec, LoadedModel

__all__ = ["EngineLoader", "warm_up"]

# What the loader calls and what runs steps.
_NEEDED = (
    "headrace_http_api.parsing.selection",
    "headrace_models.loading",
    "headrace_models.building",
    "headrace_models.weights",
    "headrace_scheduling.runner",
    "tokenizers",
)


@frozen(kw_only=True)
class EngineLoader:
    """Loads one model on the engine's thread. Picklable, so that a child process can call it."""

    name: str
    path: Path
    format: Literal["folder", "gguf"]
    dtype: Dtype

    def __call__(self) -> "LoadedModel":
        """Put a fast BLAS into the process, then load the weights.

        Raises:
            ModelError: when the model cannot be loaded.
        """
        warm_up()
        from headrace_models import ModelSource, load

        loaded = load(ModelSource(name=self.name, path=self.path, format=self.format), dtype=self.dtype)
        _show_markers(loaded.codec)
        return loaded


def warm_up() -> None:
    """Put a fast BLAS into the process, then import what loading and running a model takes. Idempotent."""
    from headrace_models import enable_fast_blas, interleave_streams, map_large_blocks

    # Only before the first import of mlx can its BLAS symbols be replaced.
    enable_fast_blas()
    interleave_streams()
    map_large_blocks()
    for name in _NEEDED:
        import_module(name)


def _show_markers(codec: "Codec") -> None:
    """Let the special tokens around reasoning and calls into the text: the HTTP side reads both from it."""
    from headrace_http_api.parsing.selection import visible_tokens

    for with_tools in (False, True):
        codec.show_tokens(visible_tokens(codec.template_source(with_tools=with_tools)))
