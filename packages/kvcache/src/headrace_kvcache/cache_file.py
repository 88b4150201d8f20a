"""Caches in a safetensors file: written as a whole or not at all, and read only if every byte is the one written."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import mlx.core as mx
from attrs import field, frozen

from headrace_kvcache.cache_header import LENGTH_BYTES, build_header, header_length, parse_header
from headrace_kvcache.cache_manifest import CacheManifest, check_metadata, hashed_header, parse_manifest, with_digest
from headrace_kvcache.cache_states import SavedState, kinds_of, put_together, take_apart
from headrace_kvcache.durable_files import LOCAL_FILES, write_durably
from headrace_kvcache.errors import CacheFileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from headrace_kvcache.cache_header import FileHeader, TensorPlace
    from headrace_kvcache.cache_manifest import ScalarKind
    from headrace_kvcache.cache_states import Scalar
    from headrace_kvcache.durable_files import FileSystem

_DTYPES = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F32": mx.float32,
    "U64": mx.uint64,
    "I64": mx.int64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_INTEGERS: dict[str, Literal["i", "I", "q"]] = {"I32": "i", "U32": "I", "I64": "q"}
_MAX_TEXT = 64


@frozen
class SavedCaches:
    """What a cache file holds.

    Attributes:
        caches: one per layer, of this package.
        metadata: what was stored beside them.
        is_checked: whether the file had a checksum, which then is right.
    """

    caches: list[Any]
    metadata: Mapping[str, str] = field(factory=dict[str, str])
    is_checked: bool = True


def save_caches(
    path: str | Path,
    caches: Sequence[object],
    *,
    metadata: Mapping[str, str] | None = None,
    mode: int = 0o666,
    files: FileSystem = LOCAL_FILES,
) -> int:
    """Write caches to a safetensors file, and return its size in bytes.

    The path holds the old file or the new one whenever the program or the machine stops. Arrays are as long as the
    positions held, and evaluated. mlx-lm's `load_prompt_cache` reads the file if all kinds of its caches exist there.

    Args:
        path: of the file; its folder must be there.
        caches: one per layer: of this package, or of mlx-lm.
        metadata: texts to keep beside them; keys are plain names, and do not begin with "headrace".
        mode: permissions of a new file, less the process's mask.
        files: the calls to write with.

    Raises:
        UnsupportedCache: a cache that cannot be stored: of several rows' own lengths, or not converted yet.
        CacheFileError: metadata that cannot be stored.
        OSError: the file cannot be written; what was there is still there.
    """
    check_metadata(metadata or {})
    classes, state = take_apart(caches)
    if not classes:
        raise CacheFileError("caches is empty; hand over one cache per layer", "unsupported")
    tensors = state.arrays | {name: _wrapped(scalar) for name, scalar in state.scalars.items()}
    shapes = {name: (_NAMES[tensor.dtype], tensor.shape) for name, tensor in tensors.items()}
    manifest = CacheManifest(
        classes=classes, scalars=kinds_of(state.scalars), positions=state.positions, metadata=metadata or {}
    )
    header = build_header(shapes, manifest.to_metadata())
    mx.eval(list(tensors.values()))
    hashed = hashlib.sha256(header)
    for data in _buffers(tensors):
        hashed.update(data)
    header = with_digest(header, hashed.hexdigest())
    write_durably(Path(path), _pieces(header, tensors), mode=mode, files=files)
    return len(header) + sum(tensor.nbytes for tensor in tensors.values())


def load_caches(path: str | Path, *, allow_unchecked: bool = False) -> SavedCaches:
    """Read caches from a file of `save_caches`, or of mlx-lm's `save_prompt_cache`.

    Every byte is covered by the file's checksum, so that a file which is cut short, damaged or changed is refused. The
    checksum is no signature: it does not tell who wrote the file.

    Args:
        path: of the file.
        allow_unchecked: also take files without a checksum, mlx-lm's. Only their form is checked then: a changed
            number within a tensor goes unseen.

    Raises:
        CacheFileError: the file is something else, of another version, or not what was written; its `reason` tells.
        OSError: it cannot be read.
    """
    with _open(Path(path)) as file:
        try:
            return _load(file, allow_unchecked)
        except CacheFileError as error:
            raise CacheFileError(f"{Path(path).name!r} cannot be used: {error}", error.reason) from None


def read_manifest(path: str | Path) -> CacheManifest:
    """Read what a cache file says of itself, tensors unread and nothing verified. Raises as `load_caches`."""
    with _open(Path(path)) as file:
        return parse_manifest(_read_header(file)[1].metadata)


def _open(path: Path) -> BinaryIO:
    # Without the flag, a pipe that nobody writes to would never open.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")


def _load(file: BinaryIO, allow_unchecked: bool) -> SavedCaches:
    raw, header = _read_header(file)
    manifest = parse_manifest(header.metadata)
    if manifest.digest is None and not allow_unchecked:
        raise CacheFileError("it has no checksum; allow_unchecked=True takes mlx-lm's files as they are", "unchecked")
    hashed = hashlib.sha256(raw if manifest.digest is None else hashed_header(raw, manifest.digest))
    state = SavedState(positions=dict(manifest.positions))
    for place in header.tensors:
        data = bytearray(place.num_bytes)
        if _fill(file, data) != place.num_bytes:
            raise CacheFileError("it is cut short", "damaged")
        hashed.update(data)
        kind = manifest.scalars.get(place.name)
        if kind is None:
            state.arrays[place.name] = _array(place, data)
        else:
            state.scalars[place.name] = _unwrapped(place, kind, data)
    if manifest.digest not in (None, hashed.hexdigest()):
        raise CacheFileError("its checksum is not that of its content", "damaged")
    if manifest.scalars.keys() != state.scalars.keys():
        raise CacheFileError("it lacks numbers of its caches", "damaged")
    caches = put_together(manifest.classes, state)
    return SavedCaches(caches, manifest.metadata, manifest.digest is not None)


def _read_header(file: BinaryIO) -> tuple[bytes, FileHeader]:
    about = os.fstat(file.fileno())
    if not stat.S_ISREG(about.st_mode):
        raise CacheFileError("it is no regular file", "foreign")
    first = file.read(LENGTH_BYTES)
    length = header_length(first, about.st_size)
    text = file.read(length)
    if len(text) != length:
        raise CacheFileError("it is cut short", "damaged")
    return first + text, parse_header(text, about.st_size - LENGTH_BYTES - length)


def _fill(file: BinaryIO, data: bytearray) -> int:
    view, done = memoryview(data), 0
    while done < len(data) and (count := file.readinto(view[done:])):  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
        done += count
    return done


def _array(place: TensorPlace, data: bytearray) -> mx.array:
    if not data:
        return mx.zeros(place.shape, _DTYPES[place.dtype])
    # One copy, into memory of the array's own.
    return mx.array(memoryview(data)).view(_DTYPES[place.dtype]).reshape(place.shape)  # pyright: ignore[reportArgumentType]


def _buffers(tensors: Mapping[str, mx.array]) -> Iterator[memoryview]:
    for tensor in tensors.values():
        if tensor.size:
            yield memoryview(mx.contiguous(tensor).reshape(-1).view(mx.uint8))  # pyright: ignore[reportArgumentType]


def _pieces(header: bytes, tensors: Mapping[str, mx.array]) -> Iterator[bytes | memoryview]:
    yield header
    yield from _buffers(tensors)


def _wrapped(scalar: Scalar) -> mx.array:
    """Return a scalar as mlx-lm keeps it."""
    if isinstance(scalar, int):
        return mx.array(scalar, mx.int32 if scalar < 1 << 31 else mx.int64)
    return mx.array([] if scalar is None else [ord(each) for each in scalar])


def _unwrapped(place: TensorPlace, kind: ScalarKind, data: bytearray) -> Scalar:
    if kind == "none":
        if place.num_bytes:
            raise CacheFileError(f"{place.name} is to be nothing and is not", "damaged")
        return None
    if place.dtype not in _INTEGERS or place.num_bytes > 8 * _MAX_TEXT:
        raise CacheFileError(f"{place.name} is no number and no text", "damaged")
    values = memoryview(data).cast(_INTEGERS[place.dtype]).tolist()
    if kind == "scalar" and place.shape == ():
        return values[0]
    if kind == "string" and all(0 < value < 128 for value in values):
        return "".join(map(chr, values))
    raise CacheFileError(f"{place.name} is no {kind}", "damaged")
