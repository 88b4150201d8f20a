"""The header of a safetensors file: where each tensor lies, and what the file says of itself. Free of arrays.

The layout is that of the safetensors format: eight bytes with the length of a JSON object, the object, then the tensors
without gaps. It is read here and not by the library, because a file is hashed in the one pass that reads it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn, cast

from attrs import frozen

from headrace_kvcache.errors import CacheFileError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LENGTH_BYTES = 8
# Room for some three million tokens; what claims more is no file of ours, and is not read into memory.
MAX_HEADER_BYTES = 16 << 20

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
}

_METADATA = "__metadata__"
_MAX_DIM = (1 << 31) - 1


@frozen
class TensorPlace:
    """One tensor of a file.

    Attributes:
        name: unique within the file.
        dtype: a key of `ITEM_BYTES`.
        shape: its sizes.
        start: its first byte, counted from the end of the header.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """How many bytes it takes."""
        size = ITEM_BYTES[self.dtype]
        for dim in self.shape:
            size *= dim
        return size


@frozen
class FileHeader:
    """What stands before the tensors.

    Attributes:
        tensors: in the order of the file.
        metadata: what the file says of itself.
    """

    tensors: tuple[TensorPlace, ...]
    metadata: Mapping[str, str]

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(place.num_bytes for place in self.tensors)


def build_header(shapes: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a file of tensors of given dtypes and shapes, which follow in this order.

    Raises:
        CacheFileError: the header would be longer than readers take.
    """
    entries: dict[str, object] = {_METADATA: dict(metadata)}
    start = 0
    for name, (dtype, shape) in shapes.items():
        place = TensorPlace(name, dtype, shape, start)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + place.num_bytes]}
        start += place.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise CacheFileError(
            f"the header takes {len(text)} bytes, at most {MAX_HEADER_BYTES} can be read: keep less metadata",
            "too-large",
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_length(first: bytes, file_bytes: int) -> int:
    """Return the length of the JSON that follows the first eight bytes of a file.

    Raises:
        CacheFileError: the file is too short for it, or says what cannot be.
    """
    length = int.from_bytes(first, "little")
    if len(first) < LENGTH_BYTES or length > MAX_HEADER_BYTES:
        raise CacheFileError("it does not begin like a safetensors file of caches", "foreign")
    if length > file_bytes - LENGTH_BYTES:
        raise CacheFileError(f"its header takes {length} bytes, more than the file has", "damaged")
    return length


def parse_header(text: bytes, data_bytes: int) -> FileHeader:
    """Read the JSON of a header; the tensors must fill the `data_bytes` that follow it without gaps.

    Raises:
        CacheFileError: it is no header, or does not fit the file.
    """
    try:
        # RecursionError is one of its own; the others are ValueErrors.
        entries: object = json.loads(text, object_pairs_hook=_distinct, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise CacheFileError("its header is no JSON of safetensors", "foreign") from None
    if not isinstance(entries, dict):
        raise CacheFileError("its header is no JSON object", "foreign")
    entries = cast("dict[str, object]", entries)
    metadata = entries.pop(_METADATA, {})
    if not _is_text_map(metadata):
        raise CacheFileError("its metadata is no map of texts", "damaged")
    places = sorted((_place(name, entry) for name, entry in entries.items()), key=_order)
    end = 0
    for place in places:
        if place.start != end:
            raise CacheFileError(f"tensor {place.name!r} begins at {place.start}, where {end} is free", "damaged")
        end += place.num_bytes
    if end != data_bytes:
        raise CacheFileError(f"its tensors take {end} bytes and the file has {data_bytes}", "damaged")
    return FileHeader(tuple(places), cast("dict[str, str]", metadata))


def _order(place: TensorPlace) -> tuple[int, int]:
    # Tensors without elements take no room, and lie before the one that begins where they do.
    return place.start, place.num_bytes


def _place(name: str, entry: object) -> TensorPlace:
    if not isinstance(entry, dict) or set(cast("dict[str, object]", entry)) != {"dtype", "shape", "data_offsets"}:
        raise CacheFileError(f"tensor {name!r} has no dtype, shape and data_offsets", "damaged")
    fields = cast("dict[str, Any]", entry)
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CacheFileError(f"tensor {name!r} has the dtype {dtype!r}; caches have {', '.join(ITEM_BYTES)}", "damaged")
    if not _are_counts(shape, _MAX_DIM) or not _are_counts(offsets, 1 << 62) or len(offsets) != 2:
        raise CacheFileError(f"tensor {name!r} has a shape or place that cannot be", "damaged")
    place = TensorPlace(name, dtype, tuple(shape), offsets[0])
    if offsets[1] - offsets[0] != place.num_bytes:
        raise CacheFileError(f"tensor {name!r} does not take the bytes of its shape", "damaged")
    return place


def _are_counts(values: object, most: int) -> bool:
    if not isinstance(values, list):
        return False
    return all(type(value) is int and 0 <= value <= most for value in cast("Sequence[object]", values))  # pyright: ignore[reportOperatorIssue]


def _is_text_map(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in cast("dict[str, object]", value).values())


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(text)
