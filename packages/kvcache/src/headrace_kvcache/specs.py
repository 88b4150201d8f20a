"""Reads off used caches what they hold: the geometry of a model that nobody described."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_kvcache.chunked import ChunkedKVCache
from headrace_kvcache.composite import CacheList
from headrace_kvcache.errors import EmptyCache, UnsupportedCache
from headrace_kvcache.plain import KVCache
from headrace_kvcache.recurrent import RecurrentCache
from headrace_kvcache.rotating import RotatingKVCache
from headrace_kvcache.spec import CacheSpec, ElementType, LayerSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ELEMENT_TYPES: dict[mx.Dtype, ElementType] = {
    mx.float32: "float32",
    mx.bfloat16: "bfloat16",
    mx.float16: "float16",
}


def cache_spec_of(caches: Sequence[object]) -> CacheSpec:
    """Describe a model by one row's unquantized caches, once at least one token went through it.

    Float32 arrays of a recurrent layer count as state, others as tail. Latent attention shows as the one head of
    plain attention that it is.

    Args:
        caches: the caches by layer.

    Raises:
        EmptyCache: nothing was appended yet.
        UnsupportedCache: a quantized cache, or one of another library.
    """
    layers = [layer_spec_of(cache) for cache in caches]
    dtypes = [array.dtype for array in _arrays(caches)]
    # A float32 state beside bfloat16 keys must not make them look twice as large.
    dtype = next((dtype for dtype in dtypes if dtype != mx.float32), mx.float32)
    if dtype not in _ELEMENT_TYPES:
        raise UnsupportedCache(f"the caches hold {dtype}; the element types are {', '.join(_ELEMENT_TYPES.values())}")
    return CacheSpec(layers=layers, dtype=_ELEMENT_TYPES[dtype])


def layer_spec_of(cache: object) -> LayerSpec:
    """Describe one used cache, see `cache_spec_of`."""
    if isinstance(cache, CacheList):
        return LayerSpec.list_of(*(layer_spec_of(each) for each in cache.caches))
    if isinstance(cache, RecurrentCache):
        arrays = list(_arrays([cache]))
        state = sum(array.size for array in arrays if array.dtype == mx.float32)
        return LayerSpec.recurrent(tail_elements=sum(array.size for array in arrays) - state, state_elements=state)
    if not isinstance(cache, KVCache | RotatingKVCache | ChunkedKVCache):
        raise UnsupportedCache(f"a {type(cache).__qualname__} does not tell its geometry; hand over unquantized caches")
    keys, values = _pair(cache)
    sizes = {"num_kv_heads": keys.shape[1], "key_head_dim": keys.shape[3], "value_head_dim": values.shape[3]}
    if isinstance(cache, RotatingKVCache):
        return LayerSpec.sliding(window=cache.max_size, **sizes)
    if isinstance(cache, ChunkedKVCache):
        return LayerSpec.chunked(chunk_size=cache.chunk_size, **sizes)
    return LayerSpec.full(**sizes)


def _pair(cache: KVCache | RotatingKVCache | ChunkedKVCache) -> tuple[mx.array, mx.array]:
    keys, values = cache.keys, cache.values
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        raise EmptyCache("a cache holds nothing yet; put a token through the model first")
    return keys, values


def _arrays(caches: Sequence[object]) -> Iterator[mx.array]:
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from _arrays(cache.caches)
        elif isinstance(cache, RecurrentCache):
            yield from cache.arrays
        elif isinstance(cache, KVCache | RotatingKVCache | ChunkedKVCache):
            yield from _pair(cache)
