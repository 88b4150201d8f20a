"""The command `headrace convert`."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_chat_server.console import say
from headrace_chat_server.errors import InvalidSetting, ModelUnavailable
from headrace_chat_server.models import find_model, require_backend

if TYPE_CHECKING:
    from headrace_models.exporting import ExportDtype

_DEFAULT_BITS = 4


def run_convert(
    model: str,
    folder: str,
    *,
    bits: int | None,
    group_size: int,
    dtype: "ExportDtype | None",
    mixed: str | None,
    bits_file: str | None,
) -> int:
    """Quantize a model into a folder for MLX; return the exit code.

    Raises:
        InvalidSetting: a flag or the bits file asks for what cannot be.
        ModelUnavailable: when the model cannot be found, read or written.
    """
    if mixed is not None and bits is not None:
        message = f"--bits {bits} and --mixed {mixed} both decide the bits: leave one of them out"
        raise InvalidSetting(message, origin="flag --mixed", field="mixed")
    from headrace_models import ModelError, convert, read_bits_file
    from headrace_models.packing_plan import check_packing

    require_backend()
    try:
        check_packing(_DEFAULT_BITS if bits is None else bits, group_size)
        rules = [] if bits_file is None else read_bits_file(Path(bits_file))
        source = find_model(model)
        with _progress() as on_progress:
            convert(
                source,
                Path(folder),
                bits=_DEFAULT_BITS if bits is None else bits,
                group_size=group_size,
                dtype=dtype,
                recipe=mixed,
                rules=rules,
                on_progress=on_progress,
            )
    except (ModelError, OSError) as error:
        raise ModelUnavailable(f"the model {model!r} cannot be converted to {folder!r}: {error}") from error
    except ValueError as error:
        raise InvalidSetting(str(error), origin="command line", field="convert") from error
    say(f"{folder} holds {source.name}")
    return 0


@contextmanager
def _progress() -> Generator[Callable[[int, int], None] | None]:
    """Show a bar on a terminal; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("weights", total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance
