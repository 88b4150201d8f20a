"""What the command line prints for people: coloured on a terminal, plain elsewhere."""

import json
import shlex
import sys
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def announce_loading(model: str, url: str) -> None:
    """Say where the server listens while the model loads."""
    say(f"Headrace listens on {url} and loads {model}")


def announce(model: str, url: str) -> None:
    """Say that the server is ready, and how to try it."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    hint = f"curl {url}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}"
    if not sys.stdout.isatty():
        sys.stdout.write(f"Headrace serves {model} on {url}/v1\n{hint}\n")
        sys.stdout.flush()
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    console.print(Text.assemble("Headrace serves ", (model, "bold"), " on ", (f"{url}/v1", "bold cyan")))
    console.print(Text.assemble(("Try it: ", "dim"), hint))
    console.print(Text("Ctrl-C finishes what is running and stops; a second one stops at once.", style="dim"))


def announce_saving(folder: str) -> None:
    """Say what an orderly end still does."""
    say(f"Headrace stores prompts in {folder}; Ctrl-C again stops at once")


def table(rows: list[tuple[str, str]], title: str) -> None:
    """Print rows of name and value."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, value)
    Console(highlight=False).print(grid)


def progress(items: Iterator[T], *, total: int) -> Iterator[T]:
    """Pass items on, with a bar on a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, total=total, console=Console(stderr=True), description="Answering")


def say(line: str) -> None:
    """Print one line."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
