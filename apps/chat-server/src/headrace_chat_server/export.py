"""The command `headrace export`."""

from pathlib import Path
from typing import TYPE_CHECKING

from headrace_chat_server.console import say
from headrace_chat_server.errors import ModelUnavailable
from headrace_chat_server.models import find_model, require_backend

if TYPE_CHECKING:
    from headrace_models.exporting import ExportDtype


def run_export(model: str, folder: str, *, dtype: "ExportDtype") -> int:
    """Write a model as a plain folder; return the exit code.

    Raises:
        ModelUnavailable: when the model cannot be found, read or written.
    """
    from headrace_models import enable_fast_blas

    require_backend()
    source = find_model(model)
    enable_fast_blas()
    from headrace_models import ModelError, export

    try:
        export(source, Path(folder), dtype=dtype)
    except (ModelError, OSError) as error:
        raise ModelUnavailable(f"the model {model!r} cannot be exported to {folder!r}: {error}") from error
    say(f"{folder} holds {source.name}")
    return 0
