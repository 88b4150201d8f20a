"""Attention of queries over keys and values that already lie in a cache."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from headrace_kvcache.causal import causal_attention
from headrace_kvcache.errors import InvalidGeometry, InvalidLength
from headrace_kvcache.masks import Mask, causal_mask
from headrace_kvcache.single_query import single_query_attention
from headrace_kvcache.tiles import tiled_attention

__all__ = ["AttendingCache", "Mask", "attend", "causal_mask", "masked_attention"]


class AttendingCache(Protocol):
    """A cache that appends keys and values and attends over what it holds."""

    def attend(
        self,
        queries: mx.array,
        keys: mx.array | None,
        values: mx.array | None,
        *,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array: ...


def attend(
    cache: AttendingCache,
    queries: mx.array,
    keys: mx.array | None,
    values: mx.array | None,
    *,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Append keys and values to a cache and attend over everything that it then holds.

    Only the cache knows its masks: position p sees the columns up to p, the last `window` of them if given.

    Args:
        cache: a `KVCache`, or one layer's `SlotView` of a `RowBatch`.
        queries: `(B, Hq, T, D)`, positioned (rope applied).
        keys: `(B, Hk, T, D)`, positioned, Hq a multiple of Hk; None attends without appending: the queries then
            are the last T positions that the cache holds.
        values: `(B, Hk, T, Dv)`; None exactly if `keys` is.
        scale: factor of the scores.
        window: number of columns a position sees, itself included; None for all.
        sinks: `(Hq,)` logits that take part in the softmax and carry no value, in the queries' dtype.
        softcap: bounds the scaled scores to `softcap * tanh(scores / softcap)`.

    Returns:
        `(B, Hq, T, Dv)` in the queries' dtype.

    Raises:
        InvalidGeometry: shapes or dtypes that do not fit the cache or each other, or a softcap that is not above 0.
        EmptyCache: nothing is appended and the cache does not hold T positions.
        InvalidLength: a window that is not an integer of at least 1.
    """
    if window is not None and (type(window) is not int or window < 1):
        raise InvalidLength(f"window is {window!r}; it must be an integer of at least 1, or None for all columns")
    if softcap is not None and not softcap > 0:
        raise InvalidGeometry(f"softcap is {softcap!r}; it must be above 0, or None for no bound")
    return cache.attend(queries, keys, values, scale=scale, window=window, sinks=sinks, softcap=softcap)


def masked_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Mask,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Attend with a given mask: MLX's fused kernel, forms of our own on a CPU, or tiles for soft-capped scores.

    Args:
        queries: `(B, Hq, T, D)`.
        keys: `(B, Hk, L, D)`.
        values: `(B, Hk, L, Dv)`.
        scale: factor of the scores.
        mask: boolean, broadcast to `(B, 1, T, L)`; `"causal"` aligns the last query with the last column.
        sinks: `(Hq,)` logits without a value.
        softcap: bound of the scores.

    Returns:
        `(B, Hq, T, Dv)`.
    """
    if sinks is None and softcap is None and prefers_own_forms(queries):
        if queries.shape[2] == 1:
            return single_query_attention(queries, keys, values, scale=scale, mask=mask)
        if isinstance(mask, str):
            return causal_attention(queries, keys, values, scale=scale)
    if softcap is None:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    return tiled_attention(queries, _PlainTiles(keys, values), scale=scale, mask=mask, sinks=sinks, softcap=softcap)


def prefers_own_forms(queries: mx.array) -> bool:
    """Whether forms that are not MLX's kernel are faster for these queries: in float32 if a CPU is the default device.

    Half-precision queries keep the kernel, which adds up in float32.
    """
    return queries.dtype == mx.float32 and mx.default_device() == mx.Device(mx.cpu)


class _PlainTiles:
    """Keys and values as they are."""

    __slots__ = ("_keys", "_values", "dtype", "num_columns", "num_kv_heads")

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self._keys = keys
        self._values = values
        self.dtype = values.dtype
        self.num_kv_heads, self.num_columns = keys.shape[1], keys.shape[2]

    def scores(self, queries: mx.array, tile: range) -> mx.array:
        return queries @ self._keys[..., tile.start : tile.stop, :].swapaxes(-1, -2)

    def outputs(self, weights: mx.array, tile: range) -> mx.array:
        return weights @ self._values[..., tile.start : tile.stop, :]
