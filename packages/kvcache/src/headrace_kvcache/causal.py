"""Causal attention of many queries on an x86 CPU, where MLX's own spends its time on `exp` and on masked scores."""

from __future__ import annotations

import functools
import math
import platform

import mlx.core as mx

from headrace_kvcache.masks import causal_mask

_TILE = 64


@functools.cache
def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def prefers_query_tiles(queries: mx.array) -> bool:
    """Whether `causal_attention` is the faster form for these queries, on the default device."""
    return queries.dtype == mx.float32 and _is_x86() and mx.default_device() == mx.Device(mx.cpu)


def causal_attention(queries: mx.array, keys: mx.array, values: mx.array, *, scale: float) -> mx.array:
    """Attend causally, 64 queries at a time and each tile over the columns that it sees.

    MLX scores all columns for all queries, and its `exp` takes 2.6 times as long as a power of e, which is also
    nearer to the true value. 2.3 to 2.7 times faster from 190 to 512 positions; equal within 1e-6.

    Args:
        queries: `(B, Hq, T, D) float32`; the last query is aligned with the last column.
        keys: `(B, Hk, L, D)`.
        values: `(B, Hk, L, Dv)`.
        scale: factor of the scores.

    Returns:
        `(B, Hq, T, Dv) float32`.
    """
    batch, num_heads, num_queries, _ = queries.shape
    num_kv_heads, num_columns = keys.shape[1], keys.shape[2]
    grouped = (queries * scale).reshape(batch, num_kv_heads, num_heads // num_kv_heads, num_queries, -1)
    keys, values = keys[:, :, None], values[:, :, None]
    first = num_columns - num_queries
    outputs = [
        _attend_tile(grouped[:, :, :, low:high], keys[..., : first + high, :], values[..., : first + high, :])
        for low, high in _tiles(num_queries)
    ]
    attended = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=3)
    return attended.reshape(batch, num_heads, num_queries, -1)


def _tiles(num_queries: int) -> list[tuple[int, int]]:
    return [(low, min(low + _TILE, num_queries)) for low in range(0, num_queries, _TILE)]


def _attend_tile(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    num_queries, num_columns = queries.shape[-2], keys.shape[-2]
    mask = causal_mask(mx.arange(num_columns - num_queries, num_columns)[:, None], range(num_columns))
    scores = mx.where(mask, queries @ keys.swapaxes(-1, -2), -mx.inf)
    weights = mx.power(math.e, scores - mx.max(scores, axis=-1, keepdims=True))
    return (weights @ values) / mx.sum(weights, axis=-1, keepdims=True)
