"""Finding the model that a person named, with one-line errors."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from headrace_chat_server.errors import ModelUnavailable

if TYPE_CHECKING:
    from headrace_models import ModelSource


def find_model(name: str | None) -> "ModelSource":
    """Resolve a model, fetching it with a progress bar where needed; None is the default model.

    Raises:
        ModelUnavailable: when there is no such model or fetching it failed.
    """
    from headrace_models import DEFAULT_MODEL, ModelError, resolve

    try:
        return resolve(DEFAULT_MODEL if name is None else name, progress=True)
    except ModelError as error:
        raise ModelUnavailable(str(error)) from error


def require_backend() -> None:
    """Check that MLX is installed, without importing it.

    Raises:
        ModelUnavailable: naming the extras that bring it.
    """
    if find_spec("mlx") is None:
        raise ModelUnavailable(
            "MLX is not installed: install headrace-chat-server[cpu], headrace-chat-server[cuda12] or "
            "headrace-chat-server[cuda13]; on macOS it needs Apple silicon"
        )
