"""Twins of single-row caches, whatever their kind: other array objects, the same bytes until one side is written."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import mlx.core as mx

from headrace_kvcache.composite import CacheList
from headrace_kvcache.converting import ConvertingCache
from headrace_kvcache.errors import UnsupportedCache
from headrace_kvcache.linear import LinearCache
from headrace_kvcache.recurrent import RecurrentCache
from headrace_kvcache.rotating import RotatingCache
from headrace_kvcache.stored import StoredCache
from headrace_kvcache.trims import is_cache, num_tokens_held, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    ArrayFunction: TypeAlias = Callable[[mx.array], mx.array]

_Cache = TypeVar("_Cache")

# Classes of mlx-lm whose columns are positions: what lies beyond their offset is room.
_FOREIGN_LINEAR = frozenset({"KVCache", "QuantizedKVCache"})


def clone_caches(caches: Sequence[_Cache]) -> list[_Cache]:
    """Return caches that hold the same positions and that can be used without the others noticing.

    Array objects are new, because a slice write changes an object for all of its holders. Bytes are shared until one
    side is written: the first append to either side copies its buffers, and cloning itself copies nothing.

    Args:
        caches: one per layer: of this package, `CacheList` included, or of mlx-lm.

    Raises:
        UnsupportedCache: something that is no single-row cache.
    """
    return [_twin(cache, _fresh) for cache in caches]


def shortened(cache: _Cache, num_tokens: int, *, step: int) -> _Cache:
    """Return a twin without the columns beyond the whole steps of `num_tokens` positions; trim it to these.

    So a first append copies what the twin holds and not all that it was cut from.
    """
    if isinstance(cache, CacheList | ConvertingCache) or parts_of(cache) is not None:
        return _rebuilt(cache, lambda part: shortened(part, num_tokens, step=step))
    columns, held = -(-num_tokens // step) * step, _num_columns(cache)
    return _twin(cache, _fresh) if held is None or held <= columns else _cut(cache, columns, _fresh)


def compacted(caches: Sequence[_Cache]) -> list[_Cache]:
    """Return twins that hold little beyond their positions; the arrays are lazy.

    A buffer is shared if it is that small already (16 KiB more at most); a view of a larger buffer is copied, so
    that it does not keep that alive, and so is one of which more than a quarter is room.
    """
    return [_compacted(cache) for cache in caches]


def arrays_of(caches: Iterable[object]) -> list[mx.array]:
    """Return every array that caches hold, in array objects of their own."""
    found: list[mx.array] = []

    def note(array: mx.array) -> mx.array:
        found.append(_fresh(array))
        return array

    for cache in caches:
        _twin(cache, note)
    return found


def _fresh(array: mx.array) -> mx.array:
    # Indexing shares the bytes until one side is written.
    return array[...]


def _twin(cache: _Cache, function: ArrayFunction) -> _Cache:
    """Return a cache like the given one with every array replaced by what the function gives for it."""
    if isinstance(cache, StoredCache | RecurrentCache):
        # Every concrete class has it; the base class names no state of its own.
        maker = cast("Callable[[object], _Cache]", type(cache).from_state)  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
        twin = maker(_mapped(cache.state, function))
        if isinstance(cache, RecurrentCache) and isinstance(twin, RecurrentCache):
            twin.can_replay = cache.can_replay
        return twin
    if not is_cache(cache):
        raise UnsupportedCache(f"a {type(cache).__name__} is no single-row cache of this package or of mlx-lm")
    twin = copy.copy(cache)
    try:
        attributes = vars(twin)
    except TypeError:
        raise UnsupportedCache(f"a {type(cache).__name__} does not show what it holds") from None
    for name, value in attributes.items():
        attributes[name] = _mapped(value, function)
    return twin


def _mapped(value: object, function: ArrayFunction) -> object:
    if isinstance(value, mx.array):
        return function(value)
    if isinstance(value, list | tuple):
        values = [_mapped(each, function) for each in cast("Sequence[object]", value)]
        return tuple(values) if isinstance(value, tuple) else values
    if isinstance(value, dict):
        return {key: _mapped(each, function) for key, each in cast("dict[object, object]", value).items()}
    return _twin(value, function) if is_cache(value) else value


def _compacted(cache: _Cache) -> _Cache:
    if isinstance(cache, CacheList | ConvertingCache) or parts_of(cache) is not None:
        return _rebuilt(cache, _compacted)
    if isinstance(cache, RotatingCache):
        resting = _twin(cache, _fresh)
        resting.compact()
        cache = resting
    held, columns = num_tokens_held(cache), _num_columns(cache)
    if held is not None and columns is not None and 4 * (columns - held) > columns:
        return _cut(cache, held, mx.contiguous)
    return _twin(cache, mx.contiguous)


def _rebuilt(cache: _Cache, function: Callable[[Any], Any]) -> _Cache:
    """Return a copy of a cache of caches in which each is what the function gives for it."""
    twin = copy.copy(cache)
    attributes = vars(twin)
    for name, value in attributes.items():
        if is_cache(value):
            attributes[name] = function(value)
        elif isinstance(value, list | tuple):
            attributes[name] = tuple(function(each) if is_cache(each) else each for each in cast("list[Any]", value))
    return twin


def _num_columns(cache: object) -> int | None:
    """Return how many columns the buffers of a cache have whose column p is position p; None for other caches."""
    is_linear = isinstance(cache, LinearCache) or (isinstance(cache, RotatingCache) and cache.is_trimmable())
    if not is_linear and not (type(cache).__name__ in _FOREIGN_LINEAR and is_cache(cache)):
        return None
    keys: mx.array | Sequence[mx.array] | None = getattr(cache, "keys", None)
    if keys is None:
        return None
    return (keys if isinstance(keys, mx.array) else keys[0]).shape[2]


def _cut(cache: _Cache, columns: int, function: ArrayFunction) -> _Cache:
    return _twin(cache, lambda array: function(array[..., :columns, :] if array.ndim == 4 else array))
