"""Caches for a model of mlx-lm, or for one of Headrace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from headrace_kvcache.chunked import ChunkedKVCache
from headrace_kvcache.composite import CacheList, LayerCache
from headrace_kvcache.converting import ConvertingCache
from headrace_kvcache.errors import InvalidLength, InvalidScheme, UnsupportedCache
from headrace_kvcache.packing import AffinePacking
from headrace_kvcache.plain import KVCache
from headrace_kvcache.quantized import QuantizedKVCache
from headrace_kvcache.recurrent import RecurrentCache
from headrace_kvcache.rotating import RotatingKVCache, RotatingQuantizedKVCache
from headrace_kvcache.turbo_cache import TurboQuantKVCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace_kvcache.scheme import KVScheme

# What mlx-lm keeps when it bounds plain caches.
_KEPT_SINKS = 4

# Models that ask for the class of a cache instead of using it: with another one they would silently forget.
_BOUND_TO_A_CLASS = frozenset({"mlx_lm.models.mamba"})

_OWN = (
    CacheList,
    ChunkedKVCache,
    ConvertingCache,
    KVCache,
    QuantizedKVCache,
    RecurrentCache,
    RotatingKVCache,
    RotatingQuantizedKVCache,
    TurboQuantKVCache,
)


class CacheMaker(Protocol):
    """A model that knows its own caches."""

    def make_cache(self) -> Sequence[object]: ...


class LayeredModel(Protocol):
    """A model whose layers all take a plain cache."""

    @property
    def layers(self) -> Sequence[object]: ...


def make_prompt_cache(
    model: CacheMaker | LayeredModel, *, scheme: KVScheme | None = None, max_kv_size: int | None = None
) -> list[LayerCache]:
    """Make fresh caches for one row of a model.

    Args:
        model: a model of mlx-lm, whose own caches are replaced by their twins here; or any model whose `make_cache`
            returns caches of this package, or that has `layers` and takes a plain cache for each.
        scheme: form of the caches; they convert themselves after their first chunk.
        max_kv_size: bound of plain caches: they become rings of so many positions that keep the first four.

    Returns:
        One cache per layer, in mlx-lm's protocol: `mlx_lm.generate(..., prompt_cache=make_prompt_cache(model))`.

    Raises:
        UnsupportedCache: the model makes a cache of a kind without a twin, the message has the layer's index; or
            it works with mlx-lm's own class alone (mamba).
        InvalidScheme: the scheme names a layer that can never be converted, with the layer's index.
        InvalidLength: `max_kv_size` is not an integer of at least 5.
    """
    if type(model).__module__ in _BOUND_TO_A_CLASS:
        raise UnsupportedCache(
            f"{type(model).__module__} works with mlx-lm's own cache class alone; use mlx-lm's caches"
        )
    make_cache: Callable[[], Sequence[object]] | None = getattr(model, "make_cache", None)
    layers: Sequence[object] | None = getattr(model, "layers", None)
    made: list[LayerCache]
    if make_cache is not None:
        made = [_twin(index, cache) for index, cache in enumerate(make_cache())]
    elif layers is not None:
        made = [KVCache() for _ in layers]
    else:
        raise UnsupportedCache(
            f"a {type(model).__name__} has neither make_cache nor layers; hand over a language model"
        )
    if max_kv_size is not None:
        if type(max_kv_size) is not int or max_kv_size <= _KEPT_SINKS:
            raise InvalidLength(f"max_kv_size is {max_kv_size!r}; it must be an integer above {_KEPT_SINKS}")
        made = [_bounded(cache, max_kv_size) for cache in made]
    return made if scheme is None else _converting(made, scheme)


def make_slot_prototypes(model: CacheMaker | LayeredModel, *, scheme: KVScheme | None = None) -> list[LayerCache]:
    """Make fresh caches of the kinds that a model's rows are kept in, for `make_row_batch`.

    Raises:
        UnsupportedCache: as `make_prompt_cache`, or the scheme stores a layer in a form that has no slots.
        InvalidScheme: the scheme names a layer that can never be converted, with the layer's index.
    """
    made = make_prompt_cache(model, scheme=scheme)
    return [_kept_form(index, cache) for index, cache in enumerate(made)]


def _kept_form(index: int, cache: LayerCache) -> LayerCache:
    if not isinstance(cache, ConvertingCache):
        return cache
    packing, plain = cache.packing, cache.cache
    if not isinstance(packing, AffinePacking):
        raise UnsupportedCache(f"layer {index} is to be stored as {packing.key}, a form that has no slots")
    if isinstance(plain, RotatingKVCache):
        return RotatingQuantizedKVCache(plain.max_size, plain.keep, bits=packing.bits, group_size=packing.group_size)
    return QuantizedKVCache(bits=packing.bits, group_size=packing.group_size)


def _twin(index: int, cache: object) -> LayerCache:
    if isinstance(cache, _OWN):
        return cache
    maker = _TWINS.get(type(cache).__name__)
    if maker is None:
        raise UnsupportedCache(
            f"layer {index} has a {type(cache).__module__}.{type(cache).__qualname__}, which has no twin here; "
            f"known are {', '.join(sorted(_TWINS))}"
        )
    return maker(index, cache)


# What an instance of another library's class holds is known by the name of its class alone.
_TWINS: dict[str, Callable[[int, Any], LayerCache]] = {
    "ArraysCache": lambda _, cache: RecurrentCache(len(cache.cache)),
    "CacheList": lambda index, cache: CacheList(*(_twin(index, each) for each in cache.caches)),
    "ChunkedKVCache": lambda _, cache: ChunkedKVCache(cache.chunk_size),
    "ConcatenateKVCache": lambda _, __: KVCache(),
    "KVCache": lambda _, __: KVCache(),
    "QuantizedKVCache": lambda _, cache: QuantizedKVCache(bits=cache.bits, group_size=cache.group_size),
    "RotatingKVCache": lambda _, cache: RotatingKVCache(cache.max_size, cache.keep),
}


def _bounded(cache: LayerCache, max_size: int) -> LayerCache:
    return RotatingKVCache(max_size, _KEPT_SINKS) if isinstance(cache, KVCache) else cache


def _converting(caches: list[LayerCache], scheme: KVScheme) -> list[LayerCache]:
    for entry in scheme.entries:
        if entry.layer >= len(caches) or not isinstance(caches[entry.layer], KVCache | RotatingKVCache):
            raise InvalidScheme(f"layer {entry.layer} is named, but has no cache that can be converted", entry.layer)
    found: list[LayerCache] = []
    for index, cache in enumerate(caches):
        if isinstance(cache, KVCache | RotatingKVCache):
            packing = scheme.packing_of(index, "full" if isinstance(cache, KVCache) else "sliding")
            found.append(cache if packing is None else ConvertingCache(cache, packing, start=scheme.start))
        else:
            found.append(cache)
    return found
