"""Caches as named tensors and numbers, in the layout of mlx-lm's prompt cache files, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast

import mlx.core as mx
from attrs import define, field

from headrace_kvcache.chunked import ChunkedKVCache
from headrace_kvcache.composite import CacheList
from headrace_kvcache.converting import ConvertingCache
from headrace_kvcache.errors import CacheFileError, KVCacheError, UnsupportedCache
from headrace_kvcache.plain import KVCache
from headrace_kvcache.quantized import QuantizedKVCache
from headrace_kvcache.recurrent import RecurrentCache
from headrace_kvcache.rotating import RotatingCache, RotatingKVCache, RotatingQuantizedKVCache
from headrace_kvcache.state_checks import check_fields, check_ring_columns
from headrace_kvcache.turbo_cache import TurboQuantKVCache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace_kvcache.cache_manifest import ScalarKind
    from headrace_kvcache.stored import Side, StoredCache

Scalar: TypeAlias = "int | str | None"

# A list of caches within a list of caches is all that any model has.
_MAX_DEPTH = 3


@define
class SavedState:
    """Caches taken apart.

    Attributes:
        arrays: by path: the index of the layer, then that of each part of its state.
        scalars: numbers, texts and None by path.
        positions: positions held by caches whose state in mlx-lm's layout does not tell it.
    """

    arrays: dict[str, mx.array] = field(factory=dict[str, mx.array])
    scalars: dict[str, Scalar] = field(factory=dict[str, "Scalar"])
    positions: dict[str, int] = field(factory=dict[str, int])

    def put(self, path: str, part: object) -> None:
        """Store an array, a number, a text, None, or a sequence of these under a path."""
        if isinstance(part, mx.array):
            self.arrays[path] = part
        elif isinstance(part, list | tuple):
            for index, each in enumerate(cast("Sequence[object]", part)):
                self.put(f"{path}.{index}", each)
        else:
            self.scalars[path] = cast("Scalar", part)

    def array(self, path: str) -> mx.array:
        """Take the array of a path."""
        return _taken(self.arrays, path)

    def number(self, path: str) -> int:
        """Take the number of a path."""
        found = _taken(self.scalars, path)
        if type(found) is not int:
            raise CacheFileError(f"its state has no number at {path}", "damaged")
        return found

    def text(self, path: str) -> str:
        """Take the text of a path."""
        found = _taken(self.scalars, path)
        if type(found) is not str:
            raise CacheFileError(f"its state has no text at {path}", "damaged")
        return found

    def take_none(self, path: str) -> bool:
        """Take the None of a path; False if there is something else."""
        if path not in self.scalars or self.scalars[path] is not None:
            return False
        del self.scalars[path]
        return True

    @property
    def is_used_up(self) -> bool:
        """Whether everything was taken."""
        return not (self.arrays or self.scalars or self.positions)


def _taken(parts: dict[str, Any], path: str) -> Any:
    if path not in parts:
        raise CacheFileError(f"its state has nothing fit at {path}", "damaged")
    return parts.pop(path)


def take_apart(caches: Sequence[object]) -> tuple[tuple[str, ...], SavedState]:
    """Return the classes of caches, by mlx-lm's names where it has them, and their states without any spare room.

    Raises:
        UnsupportedCache: something that cannot be stored.
    """
    state = SavedState()
    classes = tuple(_take_apart(cache, str(index), state) for index, cache in enumerate(caches))
    return classes, state


def put_together(classes: Sequence[str], state: SavedState) -> list[Any]:
    """Return caches of this package from their classes and states, which are used up.

    Raises:
        CacheFileError: a class that there is not, or a state that no cache of its class has.
    """
    caches = [_put_together(name, str(index), state, 0) for index, name in enumerate(classes)]
    if not state.is_used_up:
        raise CacheFileError("it holds more than its caches", "damaged")
    return caches


# ---- taking apart ----------------------------------------------------------------------------------------------


def _take_apart(cache: object, path: str, state: SavedState) -> str:
    own = _own(cache)
    if isinstance(own, CacheList):
        for index, part in enumerate(own.caches):
            name = _take_apart(part, f"{path}.{index}.0", state)
            state.put(f"{path}.{index}.1", name)
        return "CacheList"
    if isinstance(own, RecurrentCache):
        arrays, lengths, offset = own.state
        # The second is mlx-lm's left padding.
        state.put(path, (arrays, None, lengths))
        if offset:
            state.positions[path] = offset
        return "ArraysCache"
    state.put(path, _fitted(own))
    return type(own).__name__


def _own(cache: object) -> StoredCache | RecurrentCache | CacheList:
    """Return a cache of this package that holds the same; one of mlx-lm's is known by the name of its class."""
    if isinstance(cache, ConvertingCache):
        if isinstance(cache.cache, KVCache | RotatingKVCache):
            raise UnsupportedCache("a cache that is still to be converted cannot be stored; append to it first")
        cache = cache.cache
    if isinstance(cache, RecurrentCache | CacheList) or type(cache) in _STORED:
        return cast("StoredCache | RecurrentCache | CacheList", cache)
    foreign = _FOREIGN.get(type(cache).__name__)
    if foreign is None:
        raise UnsupportedCache(f"a {type(cache).__name__} cannot be stored; {', '.join(sorted(_READERS))} can")
    return foreign(cache)


def _recurrent_twin(cache: Any) -> RecurrentCache:
    arrays, left_padding, lengths = cache.state
    if left_padding is not None:
        raise UnsupportedCache("a cache of rows padded on the left cannot be stored; extract each row")
    return RecurrentCache.from_state((arrays, lengths, 0))


_STORED = (
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    RotatingQuantizedKVCache,
    TurboQuantKVCache,
)
_FOREIGN: dict[str, Callable[[Any], StoredCache | RecurrentCache | CacheList]] = {
    "ArraysCache": _recurrent_twin,
    "CacheList": lambda cache: CacheList(*cache.caches),
    "ChunkedKVCache": lambda cache: ChunkedKVCache.from_state(cache.state),
    "KVCache": lambda cache: KVCache.from_state(cache.state),
    "QuantizedKVCache": lambda cache: QuantizedKVCache.from_state(cache.state),
    "RotatingKVCache": lambda cache: RotatingKVCache.from_state(cache.state),
}


def _fitted(cache: StoredCache | RecurrentCache) -> tuple[object, ...]:
    """Return a cache's state with the columns that hold something alone."""
    if isinstance(cache, RotatingCache):
        resting = type(cache).from_state(cache.state)  # pyright: ignore[reportArgumentType, reportUnknownMemberType, reportAttributeAccessIssue]
        resting.compact()
        keys, values, offset, *_ = numbers = cast("tuple[Any, ...]", resting.state)
        is_linear = numbers[5] == offset
        columns = offset if is_linear else None
    else:
        keys, values, offset, *_ = numbers = cast("tuple[Any, ...]", cache.state)
        columns = None if isinstance(cache, ChunkedKVCache) else offset
    if offset == 0:
        keys = values = None
    return (_cut(keys, columns), _cut(values, columns), *numbers[2:])


def _cut(side: Side, columns: int | None) -> Side:
    if side is None or columns is None:
        return side
    if isinstance(side, mx.array):
        return side[..., :columns, :]
    return tuple(each[..., :columns, :] for each in side)


# ---- putting together ------------------------------------------------------------------------------------------


def _put_together(name: str, path: str, state: SavedState, depth: int) -> Any:
    reader = _READERS.get(name)
    if reader is None or depth == _MAX_DEPTH:
        raise CacheFileError(
            f"it holds a cache of class {name!r}; known are {', '.join(sorted(_READERS))}", "unsupported"
        )
    try:
        return reader(path, state, depth)
    except KVCacheError as error:
        if isinstance(error, CacheFileError):
            raise
        # The classes check their own numbers.
        raise CacheFileError(f"the state of {name} at {path} cannot be: {error}", "damaged") from None


def _sides(path: str, state: SavedState, num_parts: tuple[int, int]) -> tuple[Side, Side]:
    return _side(f"{path}.0", state, num_parts[0]), _side(f"{path}.1", state, num_parts[1])


def _side(path: str, state: SavedState, num_parts: int) -> Side:
    if state.take_none(path):
        return None
    if num_parts == 1:
        return state.array(path)
    return tuple(state.array(f"{path}.{index}") for index in range(num_parts))


def _numbers(path: str, state: SavedState, count: int) -> list[int]:
    return [state.number(f"{path}.{index}") for index in range(2, 2 + count)]


def _read_plain(path: str, state: SavedState, depth: int) -> KVCache:
    del depth
    keys, values = _sides(path, state, (1, 1))
    (offset,) = _numbers(path, state, 1)
    cache = KVCache.from_state((keys, values, offset))
    check_fields(cache, keys, values, least=offset)
    return cache


def _read_quantized(path: str, state: SavedState, depth: int) -> QuantizedKVCache:
    del depth
    keys, values = _sides(path, state, (3, 3))
    offset, group_size, bits = _numbers(path, state, 3)
    cache = QuantizedKVCache.from_state((keys, values, offset, group_size, bits))
    check_fields(cache, keys, values, least=offset)
    return cache


def _read_ring(path: str, state: SavedState, depth: int) -> RotatingKVCache:
    del depth
    keys, values = _sides(path, state, (1, 1))
    offset, keep, max_size, head = numbers = _numbers(path, state, 4)
    cache = RotatingKVCache.from_state((keys, values, offset, keep, max_size, head))
    columns = check_fields(cache, keys, values, least=min(offset, max_size))
    check_ring_columns(columns, *numbers)
    return cache


def _read_quantized_ring(path: str, state: SavedState, depth: int) -> RotatingQuantizedKVCache:
    del depth
    keys, values = _sides(path, state, (3, 3))
    numbers = _numbers(path, state, 6)
    offset, keep, max_size, head, group_size, bits = numbers
    cache = RotatingQuantizedKVCache.from_state((keys, values, offset, keep, max_size, head, group_size, bits))
    columns = check_fields(cache, keys, values, least=min(offset, max_size))
    check_ring_columns(columns, *numbers[:4])
    return cache


def _read_chunked(path: str, state: SavedState, depth: int) -> ChunkedKVCache:
    del depth
    keys, values = _sides(path, state, (1, 1))
    offset, chunk_size, start = _numbers(path, state, 3)
    if not 0 <= start <= offset:
        raise CacheFileError(f"a chunked cache at {path} holds from {start} to {offset}", "damaged")
    cache = ChunkedKVCache.from_state((keys, values, offset, chunk_size, start))
    check_fields(cache, keys, values, least=offset - start)
    return cache


def _read_turbo(path: str, state: SavedState, depth: int) -> TurboQuantKVCache:
    del depth
    keys, values = _sides(path, state, (3, 2))
    offset, key_bits, value_bits = _numbers(path, state, 3)
    element_type = None if state.take_none(f"{path}.5") else state.text(f"{path}.5")
    if element_type not in (None, "float32", "bfloat16", "float16"):
        raise CacheFileError(f"a cache at {path} holds {element_type!r}", "damaged")
    cache = TurboQuantKVCache.from_state((keys, values, offset, key_bits, value_bits, element_type))
    check_fields(cache, keys, values, least=offset)
    return cache


def _read_recurrent(path: str, state: SavedState, depth: int) -> RecurrentCache:
    del depth
    arrays: list[mx.array | None] = []
    while (here := f"{path}.0.{len(arrays)}") in state.arrays or here in state.scalars:
        arrays.append(None if state.take_none(here) else state.array(here))
    if not state.take_none(f"{path}.1"):
        raise CacheFileError(f"the rows of a recurrent cache at {path} are padded on the left", "unsupported")
    lengths = None if state.take_none(f"{path}.2") else state.array(f"{path}.2")
    offset = state.positions.pop(path, 0)
    if (lengths is not None and lengths.ndim != 1) or not offset >= 0:
        raise CacheFileError(f"the numbers of a recurrent cache at {path} cannot be", "damaged")
    return RecurrentCache.from_state((arrays, lengths, offset))


def _read_list(path: str, state: SavedState, depth: int) -> CacheList:
    caches: list[Any] = []
    while (name := f"{path}.{len(caches)}.1") in state.scalars and state.scalars[name] is not None:
        caches.append(_put_together(state.text(name), f"{path}.{len(caches)}.0", state, depth + 1))
    if not caches:
        raise CacheFileError(f"a list of caches at {path} is empty", "damaged")
    return CacheList(*caches)


_READERS: Mapping[str, Callable[[str, SavedState, int], Any]] = {
    "ArraysCache": _read_recurrent,
    "CacheList": _read_list,
    "ChunkedKVCache": _read_chunked,
    "KVCache": _read_plain,
    "QuantizedKVCache": _read_quantized,
    "RotatingKVCache": _read_ring,
    "RotatingQuantizedKVCache": _read_quantized_ring,
    "TurboQuantKVCache": _read_turbo,
}


def kinds_of(scalars: Mapping[str, Scalar]) -> dict[str, ScalarKind]:
    """Return by which kind mlx-lm's reader knows each scalar."""
    return {path: _kind(value) for path, value in scalars.items()}


def _kind(value: Scalar) -> ScalarKind:
    if value is None:
        return "none"
    return "string" if isinstance(value, str) else "scalar"
