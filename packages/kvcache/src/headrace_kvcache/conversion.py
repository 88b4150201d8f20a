"""Conversion of one row's caches to the form of a scheme."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_kvcache.errors import InvalidGeometry, InvalidScheme
from headrace_kvcache.packing import AffinePacking, TurboPacking
from headrace_kvcache.plain import KVCache
from headrace_kvcache.rotating import RotatingKVCache
from headrace_kvcache.spec import LayerSpec
from headrace_kvcache.specs import layer_spec_of
from headrace_kvcache.turbo_cache import TurboQuantKVCache

if TYPE_CHECKING:
    from collections.abc import Callable, MutableSequence, Sequence

    from headrace_kvcache.spec import LayerKind, Packing
    from headrace_kvcache.stored import StoredCache


def convert_layers(
    caches: MutableSequence[object], packing_of: Callable[[int, LayerKind], Packing | None], *, start: int
) -> int:
    """Convert caches in place, see `KVScheme.convert`.

    Args:
        caches: the caches by layer.
        packing_of: the form of a layer by its index and kind; None to leave it.
        start: least number of positions that a cache must hold.
    """
    wanted = _wanted(caches, packing_of, start)
    for index, packing in wanted.items():
        # One layer at a time, evaluated and its buffers given back: all at once would pin every source and result.
        twin = converted(caches[index], packing)
        mx.eval(twin.state)
        caches[index] = twin
        mx.clear_cache()
    return len(wanted)


def converted(cache: object, packing: Packing) -> StoredCache:
    """Return a cache of the same positions in another form.

    Raises:
        InvalidScheme: the cache or its head sizes do not fit the form.
    """
    try:
        if isinstance(packing, AffinePacking) and isinstance(cache, KVCache | RotatingKVCache):
            return cache.to_quantized(bits=packing.bits, group_size=packing.group_size)
        if isinstance(packing, TurboPacking) and isinstance(cache, KVCache):
            keys, values = cache.slab_arrays()
            bits = {"key_bits": packing.key_bits, "value_bits": packing.value_bits}
            return TurboQuantKVCache.from_arrays(keys, values, cache.offset, **bits)
    except InvalidGeometry as error:
        raise InvalidScheme(str(error)) from error
    raise InvalidScheme(f"a {type(cache).__name__} cannot be stored as {packing.key}")


def check_heads(packing: Packing, keys: mx.array, values: mx.array) -> None:
    """Raise `InvalidScheme` unless `keys (B, H, T, D)` and `values (B, H, T, Dv)` can be stored in a form."""
    layer = LayerSpec.full(num_kv_heads=keys.shape[1], key_head_dim=keys.shape[3], value_head_dim=values.shape[3])
    reason = packing.misfit(layer)
    if reason is not None:
        raise InvalidScheme(f"a layer cannot be stored as {packing.key}: {reason}")


def _wanted(
    caches: Sequence[object], packing_of: Callable[[int, LayerKind], Packing | None], start: int
) -> dict[int, Packing]:
    """Return which caches are to be converted to what, after checking that each can be."""
    wanted: dict[int, Packing] = {}
    for index, cache in enumerate(caches):
        if not isinstance(cache, KVCache | RotatingKVCache) or cache.offset < max(start, 1):
            continue
        layer = layer_spec_of(cache)
        packing = packing_of(index, layer.kind)
        if packing is None:
            continue
        reason = packing.misfit(layer)
        if reason is not None:
            raise InvalidScheme(f"layer {index} cannot be converted: {reason}", index)
        wanted[index] = packing
    return wanted
