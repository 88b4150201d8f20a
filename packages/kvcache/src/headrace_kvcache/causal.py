"""Causal attention of many queries on a CPU, where MLX's own also computes the scores that the mask hides."""

from __future__ import annotations

import mlx.core as mx

from headrace_kvcache.masks import causal_mask

_TILE = 64


def causal_attention(queries: mx.array, keys: mx.array, values: mx.array, *, scale: float) -> mx.array:
    """Attend causally, 64 queries at a time and each tile over the columns that it sees.

    MLX's own fallback for CPUs scores all columns for all queries. Equal to it within rounding, and bit for bit where
    one tile holds all queries.

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
    scores = mx.where(mask, queries @ keys.swapaxes(-1, -2), mx.finfo(mx.float32).min)
    return mx.softmax(scores, axis=-1) @ values
