"""Finding the model that a person named, with one-line errors."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from headrace_transcription_server.errors import ModelUnavailable

if TYPE_CHECKING:
    from headrace_models.whisper import WhisperSource

__all__ = ["find_model", "require_backend"]


def find_model(name: str) -> "WhisperSource":
    """Resolve a Whisper model, fetching it with a progress bar where needed.

    Raises:
        ModelUnavailable: when there is no such model or fetching it failed.
    """
    from headrace_models import ModelError
    from headrace_models.whisper import resolve_whisper

    try:
        return resolve_whisper(name, progress=True)
    except ModelError as error:
        raise ModelUnavailable(str(error)) from error


def require_backend() -> None:
    """Check that MLX is installed, without importing it.

    Raises:
        ModelUnavailable: naming the extras that bring it.
    """
    if find_spec("mlx") is None:
        name = "headrace-transcription-server"
        raise ModelUnavailable(
            f"MLX is not installed: install {name}[cpu], {name}[cuda12] or {name}[cuda13]; on macOS it needs Apple "
            "silicon"
        )
