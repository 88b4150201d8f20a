"""A new folder that appears whole or not at all: written beside its place, then renamed."""

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from headrace_models.errors import SourceError

__all__ = ["check_free", "draft_folder"]


def check_free(target: Path) -> None:
    """Check that nobody's files are in the way.

    Raises:
        SourceError: the path exists and is not an empty folder.
    """
    is_free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    if not is_free:
        raise SourceError(f"{str(target)!r} exists and is not an empty folder; choose another or empty it.")


@contextmanager
def draft_folder(target: Path) -> Generator[Path]:
    """Give a temporary folder to write into; it becomes `target` at the end, and is removed after any error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield draft
        _make_readable(draft)
        # rename replaces an empty folder and nothing else
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _make_readable(folder: Path) -> None:
    """Give the private temporary folder the mode that a plain mkdir would have."""
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
