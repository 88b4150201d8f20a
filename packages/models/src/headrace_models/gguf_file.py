"""GGUF files: metadata and the tensor table, parsed from the file's head; tensors dequantized by the gguf package.

Format: ggml's `docs/gguf.md`, versions 2 and 3, little-endian.
"""

import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from attrs import field, frozen

from headrace_models.errors import ModelError, SourceError, UnsupportedFormat

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGMLQuantizationType
    from numpy.typing import NDArray

__all__ = [
    "GgufFile",
    "GgufTensor",
    "check_dequantizable",
    "dequantize",
    "dequantize_rows",
    "read_gguf",
    "read_metadata",
]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SLAB_BLOCKS = 4096
_PLAIN = {"F32": "<f4", "F16": "<f2"}
# What the gguf package turns into numbers, less the types that no language model's weights have.
# fmt: off
_DECODED = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS",
    "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "IQ1_M", "TQ1_0", "TQ2_0", "MXFP4",
)
# fmt: on
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# By ggml's type number; "-" marks numbers that ggml has retired.
# fmt: off
_TENSOR_TYPES = (
    "F32", "F16", "Q4_0", "Q4_1", "-", "-", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64",
    "F64", "IQ1_M", "BF16", "-", "-", "-", "TQ1_0", "TQ2_0", "-", "-", "-", "MXFP4",
)
# fmt: on


@frozen(kw_only=True)
class GgufTensor:
    """One entry of the tensor table.

    Attributes:
        name: as llama.cpp names it.
        shape: row-major, slowest dimension first, as numpy and MLX count.
        type: ggml's name of the element type, for example `Q4_1`.
        offset: of the first byte, from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int


@frozen(kw_only=True)
class GgufFile:
    """The head of a GGUF file.

    Attributes:
        path: the file.
        metadata: key to number, string, bool or list of these.
        tensors: by name, in the file's order.
    """

    path: Path
    metadata: Mapping[str, object] = field(repr=False)
    tensors: Mapping[str, GgufTensor] = field(repr=False)


def read_metadata(path: Path) -> Mapping[str, object]:
    """Read the metadata of a GGUF file.

    Raises:
        SourceError: the file cannot be read or is cut short.
        UnsupportedFormat: the file is no GGUF file of version 2 or 3.
    """
    return read_gguf(path).metadata


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata and the tensor table of a GGUF file; no tensor data is touched.

    Raises:
        SourceError: the file cannot be read or is cut short.
        UnsupportedFormat: the file is no GGUF file of version 2 or 3.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return _parse(path, view)
    except OSError as error:
        raise SourceError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except (struct.error, ValueError, MemoryError, OverflowError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise SourceError(f"{str(path)!r} is cut short or damaged ({error}): fetch it again") from error


def check_dequantizable(file: GgufFile) -> None:
    """Check all tensors before any is read: their types can be dequantized and their bytes are in the file.

    Raises:
        SourceError: a tensor's bytes lie outside the file.
        UnsupportedFormat: the gguf package is missing, or cannot dequantize an element type.
    """
    file_size = file.path.stat().st_size
    for tensor in file.tensors.values():
        if tensor.offset + _layout(tensor).size_bytes > file_size:
            raise SourceError(f"{str(file.path)!r} ends inside tensor {tensor.name!r}: fetch it again")


def dequantize(file: GgufFile, tensor: GgufTensor) -> "NDArray[np.float32]":
    """Read one tensor as float32, in its logical shape.

    Raises:
        SourceError: the tensor's bytes lie outside the file.
        UnsupportedFormat: the gguf package is missing, or cannot dequantize the element type.
    """
    (whole,) = dequantize_rows(file, tensor, num_rows=tensor.shape[0])
    return whole


def dequantize_rows(file: GgufFile, tensor: GgufTensor, *, num_rows: int) -> "Iterator[NDArray[np.float32]]":
    """Read one tensor as float32, so many of its first dimension's rows at a time; see `dequantize`."""
    import numpy as np

    layout = _layout(tensor)
    if tensor.offset + layout.size_bytes > file.path.stat().st_size:
        raise SourceError(f"{str(file.path)!r} ends inside tensor {tensor.name!r}: fetch it again")
    row_bytes = layout.size_bytes // tensor.shape[0]
    for start in range(0, tensor.shape[0], num_rows):
        count = min(num_rows, tensor.shape[0] - start)
        offset = tensor.offset + start * row_bytes
        raw = np.fromfile(file.path, dtype=np.uint8, count=count * row_bytes, offset=offset)
        yield layout.decode(raw).reshape(count, *tensor.shape[1:])


@frozen(kw_only=True)
class _Layout:
    """How a tensor's blocks lie in the file, and how they become numbers."""

    kind: "GGMLQuantizationType"
    block_elements: int
    block_bytes: int
    size_bytes: int

    def decode(self, raw: "NDArray[np.uint8]") -> "NDArray[np.float32]":
        import numpy as np
        from gguf import quants

        if self.kind.name in _PLAIN:
            return raw.view(_PLAIN[self.kind.name]).astype(np.float32, copy=False)
        values = np.empty(raw.size // self.block_bytes * self.block_elements, np.float32)
        step = _SLAB_BLOCKS * self.block_bytes
        # One long row at a time: the package takes rows sixteen by sixteen, and a block's cost is then the call's.
        for start in range(0, raw.size, step):
            slab = quants.dequantize(raw[start : start + step][None], self.kind)
            first = start // self.block_bytes * self.block_elements
            values[first : first + slab.size] = slab[0]
        return values


def _layout(tensor: GgufTensor) -> _Layout:
    if find_spec("gguf") is None:
        raise UnsupportedFormat("dequantizing needs the gguf package, which is not installed: headrace-models[text]")
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if tensor.type not in _DECODED:
        raise UnsupportedFormat(
            f"tensor {tensor.name!r} is {tensor.type}; read are {', '.join(_DECODED)}: "
            "use a file of one of these types, or the model's Hugging Face folder"
        )
    kind = GGMLQuantizationType[tensor.type]
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    if not tensor.shape or 0 in tensor.shape or tensor.shape[-1] % block_elements:
        raise SourceError(
            f"tensor {tensor.name!r} has shape {tensor.shape}; rows of whole {tensor.type} blocks of {block_elements} "
            "are expected: fetch the file again"
        )
    return _Layout(
        kind=kind,
        block_elements=block_elements,
        block_bytes=block_bytes,
        size_bytes=prod(tensor.shape) // block_elements * block_bytes,
    )


# The gguf package's reader makes numpy views per array element: 2.4 s for SmolLM2's vocabulary, here 0.03 s.
def _parse(path: Path, view: mmap.mmap) -> GgufFile:
    if view[:4] != _MAGIC:
        raise UnsupportedFormat(f"{str(path)!r} is no GGUF file: it starts with {view[:4]!r}, expected {_MAGIC!r}")
    version, num_tensors, num_keys = struct.unpack_from("<IQQ", view, 4)
    if version not in _VERSIONS:
        raise UnsupportedFormat(
            f"{str(path)!r} is GGUF version {version}; versions {_VERSIONS} in little-endian order are read: "
            f"convert the model again with a recent llama.cpp"
        )
    cursor = _Cursor(view, 24)
    metadata: dict[str, object] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise SourceError(f"general.alignment of {str(path)!r} is {alignment!r}; a positive integer is expected")
    data = -(-cursor.position // alignment) * alignment
    tensors = {
        name: GgufTensor(name=name, shape=shape, type=kind, offset=data + offset)
        for name, shape, kind, offset in entries
    }
    return GgufFile(path=path, metadata=MappingProxyType(metadata), tensors=MappingProxyType(tensors))


def _tensor_entry(cursor: "_Cursor") -> tuple[str, tuple[int, ...], str, int]:
    name = cursor.string()
    num_dims = cursor.scalar("I")
    dims = cursor.scalars("Q", num_dims)
    type_id = cursor.scalar("I")
    kind = _TENSOR_TYPES[type_id] if type_id < len(_TENSOR_TYPES) else "-"
    if kind == "-":
        raise UnsupportedFormat(f"tensor {name!r} has ggml type {type_id}, which is not known here")
    return name, tuple(reversed(dims)), kind, cursor.scalar("Q")


class _Cursor:
    """A position in the file that reads typed values and moves on."""

    __slots__ = ("position", "view")

    def __init__(self, view: mmap.mmap, position: int) -> None:
        self.view = view
        self.position = position

    def scalars(self, code: str, count: int) -> tuple[int, ...]:
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self.view, self.position)
        self.position += struct.calcsize(layout)
        return values

    def scalar(self, code: str) -> int:
        return self.scalars(code, 1)[0]

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        # Locals instead of attributes: a vocabulary and its merges are 100,000 strings.
        view, position = self.view, self.position
        size = len(view)
        unpack: Callable[[mmap.mmap, int], tuple[int]] = struct.Struct("<Q").unpack_from
        values: list[str] = []
        for _ in range(count):
            end = position + 8 + unpack(view, position)[0]
            if end > size:
                raise ValueError(f"a string ends at byte {end} of {size}")
            values.append(view[position + 8 : end].decode("utf-8", "replace"))
            position = end
        self.position = position
        return values

    def value(self, type_id: int) -> object:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self._array()
        return self.scalar(self._code(type_id))

    def _array(self) -> list[object]:
        type_id, count = struct.unpack_from("<IQ", self.view, self.position)
        self.position += 12
        if type_id == _STRING:
            return cast("list[object]", self.strings(count))
        if type_id == _ARRAY:
            return [self._array() for _ in range(count)]
        return list(self.scalars(self._code(type_id), count))

    def _code(self, type_id: int) -> str:
        try:
            return _SCALARS[type_id]
        except KeyError:
            raise ValueError(f"value type {type_id} at byte {self.position} is not one of GGUF's") from None
