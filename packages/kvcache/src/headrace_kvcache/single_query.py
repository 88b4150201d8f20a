"""Attention of one query per row on a CPU, where MLX's own form spends more on launching operations than on numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from headrace_kvcache.masks import Mask


def single_query_attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Mask
) -> mx.array:
    """Attend with the query heads of each key head as the rows of one product.

    Equal to MLX's kernel within rounding.

    Args:
        queries: `(B, Hq, 1, D) float32`, aligned with the last column.
        keys: `(B, Hk, L, D)`.
        values: `(B, Hk, L, Dv)`.
        scale: factor of the scores.
        mask: boolean, broadcast to `(B, 1, 1, L)`; None and `"causal"` see every column.

    Returns:
        `(B, Hq, 1, Dv) float32`.
    """
    batch, num_heads, _, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    grouped = (queries * scale).reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = grouped @ keys.swapaxes(-1, -2)
    if isinstance(mask, mx.array):
        scores = mx.where(mask, scores, mx.finfo(mx.float32).min)
    return (mx.softmax(scores, axis=-1) @ values).reshape(batch, num_heads, 1, -1)
