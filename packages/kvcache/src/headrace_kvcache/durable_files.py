"""Files that are there as a whole or not at all: written beside their place, synced, then renamed into it."""

from __future__ import annotations

import os
import sys
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    Buffer: TypeAlias = bytes | bytearray | memoryview

DRAFT_SUFFIX = ".tmp"


class FileSystem(Protocol):
    """The calls by which a file comes to be. Each may raise `OSError`; tests fail or end the program at each."""

    def create(self, path: Path, mode: int) -> BinaryIO:
        """Make a file that is not there yet, with these permissions less the process's mask."""
        ...

    def write(self, file: BinaryIO, data: Buffer) -> None:
        """Write all of the data."""
        ...

    def sync(self, file: BinaryIO) -> None:
        """Bring what was written to the device."""
        ...

    def replace(self, source: Path, target: Path) -> None:
        """Put a file in the place of another, in one step."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Bring a folder's names to the device."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file."""
        ...


class LocalFiles:
    """The operating system's own calls."""

    __slots__ = ()

    def create(self, path: Path, mode: int) -> BinaryIO:
        return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb")

    def write(self, file: BinaryIO, data: Buffer) -> None:
        file.write(data)

    def sync(self, file: BinaryIO) -> None:
        file.flush()
        if sys.platform == "darwin":
            import fcntl

            # There fsync stops at the drive's own cache. Not every file system knows the stronger call.
            with suppress(OSError):
                fcntl.fcntl(file.fileno(), fcntl.F_FULLFSYNC)
                return
        os.fsync(file.fileno())

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)

    def sync_folder(self, path: Path) -> None:
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self, path: Path) -> None:
        path.unlink()


LOCAL_FILES = LocalFiles()


def write_durably(path: Path, pieces: Iterable[Buffer], *, mode: int = 0o666, files: FileSystem = LOCAL_FILES) -> None:
    """Write a file, or leave what is there as it is.

    Whenever the program or the machine stops, the path holds the old file or the new one, never a part. A program that
    is killed may leave a draft beside it, named after the file with a dot in front and `.tmp` at the end.

    Args:
        path: of the file; its folder must be there.
        pieces: its content.
        mode: permissions of a new file, less the process's mask.
        files: the calls to use.

    Raises:
        OSError: it cannot be written; nothing has changed, and the draft is gone.
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{DRAFT_SUFFIX}")
    file = files.create(draft, mode)
    try:
        with file:
            for piece in pieces:
                files.write(file, piece)
            files.sync(file)
        files.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            files.remove(draft)
        raise
    files.sync_folder(path.parent)
