"""Reads CTranslate2's `model.bin`: named variables of little-endian numbers, then aliases.

The layout was read off files: u32 version, a string and u32 revision of the model's specification, u32 count; then per
variable its name, u8 rank, u32 dimensions, u8 type, u32 size in bytes, and the numbers; at the end u32 aliases of two
strings each. A string is a u16 length, which counts a final zero, and its bytes.
"""

import struct
from collections.abc import Iterator, Sequence
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from attrs import define, frozen

from headrace_models.errors import UnsupportedFormat

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BinaryFile", "Variable", "read_variable", "scan_variables"]

_SPECIFICATION = "WhisperSpec"
_OLDEST, _NEWEST = 5, 6
_MAX_RANK = 4
_MAX_NAME = 1024
_TYPES = {0: ("<f4", 4), 1: ("<i1", 1), 2: ("<i2", 2), 3: ("<i4", 4), 4: ("<f2", 2), 5: ("bfloat16", 2)}


@frozen(kw_only=True)
class Variable:
    """Where a variable is in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """A numpy type, or `bfloat16`."""
    offset: int
    size_bytes: int


@frozen(eq=False)
class BinaryFile:
    """A file, or its parts read as one. It must not be cut short while it is in use: it is mapped, not copied."""

    path: Path
    """Of the first part."""
    _parts: tuple[memoryview, ...]

    @classmethod
    def open(cls, paths: Sequence[Path]) -> "BinaryFile":
        """Map a file or its parts, in order; what is read of it keeps the map."""
        parts: list[memoryview] = []
        for path in paths:
            with path.open("rb") as file:
                # An empty file cannot be mapped.
                is_empty = path.stat().st_size == 0
                parts.append(memoryview(b"" if is_empty else mmap(file.fileno(), 0, access=ACCESS_READ)))
        return cls(paths[0], tuple(parts))

    def read(self, offset: int, count: int) -> bytes | memoryview:
        """Return exactly so many bytes, without copying those of one part.

        Raises:
            UnsupportedFormat: the file ends before.
        """
        found: list[memoryview] = []
        start, left = offset, count
        for part in self._parts:
            if left > 0 and start < len(part):
                found.append(part[start : start + left])
                left -= len(found[-1])
            start = max(0, start - len(part))
        if count < 0 or left > 0 or (not count and start > 0):
            raise UnsupportedFormat(f"{str(self.path)!r} is cut short or no CTranslate2 model: fetch it again")
        return found[0] if len(found) == 1 else b"".join(found)


@define
class _Cursor:
    file: BinaryFile
    offset: int = 0

    def number(self, kind: str) -> int:
        size = struct.calcsize(f"<{kind}")
        (value,) = struct.unpack(f"<{kind}", self.take(size))
        return value

    def text(self) -> str:
        length = self.number("H")
        if not 1 <= length <= _MAX_NAME:
            raise UnsupportedFormat(f"{str(self.file.path)!r} has a name of {length} bytes: fetch it again")
        return bytes(self.take(length)[:-1]).decode(errors="replace")

    def take(self, count: int) -> bytes | memoryview:
        found = self.file.read(self.offset, count)
        self.offset += count
        return found


def scan_variables(file: BinaryFile) -> dict[str, Variable]:
    """List the variables of a Whisper model without reading their numbers.

    Raises:
        UnsupportedFormat: not a CTranslate2 Whisper model of a known version, or cut short.
    """
    cursor = _Cursor(file)
    version = cursor.number("I")
    if not _OLDEST <= version <= _NEWEST:
        raise UnsupportedFormat(
            f"{str(file.path)!r} has the binary version {version}; CTranslate2's {_OLDEST} and {_NEWEST} are read: "
            "convert the model with a current CTranslate2"
        )
    specification = cursor.text()
    if specification != _SPECIFICATION:
        raise UnsupportedFormat(f"{str(file.path)!r} holds a {specification!r}; {_SPECIFICATION!r} is expected")
    cursor.number("I")
    return {variable.name: variable for variable in _variables(cursor)}


def _variables(cursor: _Cursor) -> Iterator[Variable]:
    for _ in range(cursor.number("I")):
        name, rank = cursor.text(), cursor.number("B")
        shape = tuple(cursor.number("I") for _ in range(min(rank, _MAX_RANK + 1)))
        dtype, item_bytes = _TYPES.get(cursor.number("B"), ("", 0))
        size_bytes = cursor.number("I")
        if rank > _MAX_RANK or not dtype or prod(shape) * item_bytes != size_bytes:
            raise UnsupportedFormat(f"variable {name!r} of {str(cursor.file.path)!r} is malformed: fetch it again")
        # Also checks that the numbers are all there, before any is read.
        cursor.file.read(cursor.offset + size_bytes, 0)
        yield Variable(name=name, shape=shape, dtype=dtype, offset=cursor.offset, size_bytes=size_bytes)
        cursor.offset += size_bytes


def read_variable(
    file: BinaryFile, variable: Variable, first: int = 0, last: int | None = None
) -> "NDArray[np.generic]":
    """Return a variable's numbers, or its rows `first` to `last`, in their shape; bfloat16 becomes float32.

    Raises:
        UnsupportedFormat: the file is another one than was scanned.
    """
    num_rows = variable.shape[0] if variable.shape else 1
    last = num_rows if last is None else last
    row_bytes = variable.size_bytes // max(1, num_rows)
    shape = (last - first, *variable.shape[1:]) if variable.shape else ()
    data = file.read(variable.offset + first * row_bytes, (last - first) * row_bytes)
    if variable.dtype == "bfloat16":
        wide = np.frombuffer(data, "<u2").astype("<u4") << 16
        return wide.view("<f4").reshape(shape)
    return np.frombuffer(data, variable.dtype).reshape(shape)
