"""Attention of queries over keys and values that already lie in a cache."""

from __future__ import annotations

from typing import Literal, Protocol

import mlx.core as mx

Mask = mx.array | Literal["causal"] | None


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
        InvalidGeometry: shapes or dtypes that do not fit the cache or each other.
        EmptyCache: nothing is appended and the cache does not hold T positions.
    """
    return cache.attend(queries, keys, values, scale=scale, window=window, sinks=sinks, softcap=softcap)


def causal_mask(positions: mx.array, columns: range, *, window: int | None = None) -> mx.array:
    """Build the boolean mask of queries at `positions (..., T, 1)` over cache columns, shape `(..., T, L)`."""
    column_ids = mx.arange(columns.start, columns.stop)
    mask = column_ids <= positions
    return mask if window is None else mask & (column_ids > positions - window)


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
    """Attend with a given mask; MLX's fused kernel unless the scores are soft-capped.

    Args:
        queries: `(B, Hq, T, D)`.
        keys: `(B, Hk, L, D)`.
        values: `(B, Hk, L, Dv)`.
        scale: factor of the scores.
        mask: boolean, broadcast to `(B, Hq, T, L)`; `"causal"` aligns the last query with the last column.
        sinks: `(Hq,)` logits without a value.
        softcap: bound of the scores.

    Returns:
        `(B, Hq, T, Dv)`.
    """
    if softcap is None:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    batch, num_heads, num_queries, _ = queries.shape
    num_kv_heads, num_columns = keys.shape[1], keys.shape[2]
    grouped = (queries * scale).reshape(batch, num_kv_heads, num_heads // num_kv_heads, num_queries, -1)
    scores = (grouped @ keys[:, :, None].swapaxes(-1, -2)).astype(mx.float32)
    scores = softcap * mx.tanh(scores / softcap)
    if isinstance(mask, str):
        last = mx.arange(num_columns - num_queries, num_columns)[:, None]
        mask = causal_mask(last, range(num_columns))
    if mask is not None:
        expanded = mask[:, :, None] if mask.ndim == 4 else mask
        scores = mx.where(expanded, scores, -mx.inf)
    weights = _softmax(scores, None if sinks is None else sinks.reshape(num_kv_heads, -1, 1, 1))
    return (weights.astype(values.dtype) @ values[:, :, None]).reshape(batch, num_heads, num_queries, -1)


def _softmax(scores: mx.array, sinks: mx.array | None) -> mx.array:
    if sinks is None:
        return mx.softmax(scores, axis=-1)
    column = mx.broadcast_to(sinks.astype(scores.dtype), (*scores.shape[:-1], 1))
    return mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
