"""Reads CTranslate2's `model.bin`: named variables of little-endian numbers, then aliases.

The layout was read off files: u32 version, a string and u32 revision of the model's specification, u32 count; then per
variable its name, u8 rank, u32 dimensions, u8 type, u32 size in bytes, and the numbers; at the end u32 aliases of two
strings each. A string is a u16 length, which counts a final zero, and its bytes.
"""

import struct
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self

import numpy as np
from attrs import define, field, frozen

from headrace_models.errors import UnsupportedFormat

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Variable", "read_variable", "scan_variables"]

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


@define
class _Parts:
    """Files read as one, in order."""

    paths: tuple[Path, ...]
    _files: list[BinaryIO] = field(factory=list[BinaryIO])
    _ends: list[int] = field(factory=list[int])

    def __enter__(self) -> Self:
        end = 0
        for path in self.paths:
            end += path.stat().st_size
            self._ends.append(end)
            self._files.append(path.open("rb"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()

    @property
    def size(self) -> int:
        return self._ends[-1]

    def read(self, offset: int, count: int) -> bytes:
        """Read exactly so many bytes.

        Raises:
            UnsupportedFormat: the file ends before.
        """
        if count < 0 or offset + count > self.size:
            raise UnsupportedFormat(f"{str(self.paths[0])!r} is cut short or no CTranslate2 model: fetch it again")
        found = b""
        start = 0
        for file, end in zip(self._files, self._ends, strict=True):
            if offset < end and count > len(found):
                file.seek(offset - start)
                piece = file.read(min(count - len(found), end - offset))
                found += piece
                offset += len(piece)
            start = end
        return found


@define
class _Cursor:
    parts: _Parts
    offset: int = 0

    def number(self, kind: str) -> int:
        size = struct.calcsize(f"<{kind}")
        (value,) = struct.unpack(f"<{kind}", self.take(size))
        return value

    def text(self) -> str:
        length = self.number("H")
        if not 1 <= length <= _MAX_NAME:
            raise UnsupportedFormat(f"{str(self.parts.paths[0])!r} has a name of {length} bytes: fetch it again")
        return self.take(length)[:-1].decode(errors="replace")

    def take(self, count: int) -> bytes:
        found = self.parts.read(self.offset, count)
        self.offset += count
        return found


def scan_variables(paths: Sequence[Path]) -> dict[str, Variable]:
    """List the variables of a Whisper model without reading their numbers.

    Args:
        paths: the file, or its parts in order.

    Raises:
        UnsupportedFormat: not a CTranslate2 Whisper model of a known version, or cut short.
    """
    with _Parts(tuple(paths)) as parts:
        cursor = _Cursor(parts)
        version = cursor.number("I")
        if not _OLDEST <= version <= _NEWEST:
            raise UnsupportedFormat(
                f"{str(paths[0])!r} has the binary version {version}; CTranslate2's {_OLDEST} and {_NEWEST} are read: "
                "convert the model with a current CTranslate2"
            )
        specification = cursor.text()
        if specification != _SPECIFICATION:
            raise UnsupportedFormat(f"{str(paths[0])!r} holds a {specification!r}; {_SPECIFICATION!r} is expected")
        cursor.number("I")
        return {variable.name: variable for variable in _variables(cursor)}


def _variables(cursor: _Cursor) -> Iterator[Variable]:
    for _ in range(cursor.number("I")):
        name, rank = cursor.text(), cursor.number("B")
        shape = tuple(cursor.number("I") for _ in range(min(rank, _MAX_RANK + 1)))
        dtype, item_bytes = _TYPES.get(cursor.number("B"), ("", 0))
        size_bytes = cursor.number("I")
        if rank > _MAX_RANK or not dtype or prod(shape) * item_bytes != size_bytes:
            raise UnsupportedFormat(f"variable {name!r} of {str(cursor.parts.paths[0])!r} is malformed: fetch it again")
        # Also checks that the numbers are all there, before any is read.
        cursor.parts.read(cursor.offset + size_bytes, 0)
        yield Variable(name=name, shape=shape, dtype=dtype, offset=cursor.offset, size_bytes=size_bytes)
        cursor.offset += size_bytes


def read_variable(
    paths: Sequence[Path], variable: Variable, first: int = 0, last: int | None = None
) -> "NDArray[np.generic]":
    """Read a variable's numbers, or its rows `first` to `last`, in their shape; bfloat16 becomes float32.

    Raises:
        UnsupportedFormat: the file is shorter than when it was scanned.
    """
    num_rows = variable.shape[0] if variable.shape else 1
    last = num_rows if last is None else last
    row_bytes = variable.size_bytes // max(1, num_rows)
    shape = (last - first, *variable.shape[1:]) if variable.shape else ()
    with _Parts(tuple(paths)) as parts:
        data = parts.read(variable.offset + first * row_bytes, (last - first) * row_bytes)
    if variable.dtype == "bfloat16":
        wide = np.frombuffer(data, "<u2").astype("<u4") << 16
        return wide.view("<f4").reshape(shape)
    return np.frombuffer(data, variable.dtype).reshape(shape)
