"""Which columns of a cache a query sees."""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

Mask = mx.array | Literal["causal"] | None


def causal_mask(positions: mx.array, columns: range, *, window: int | None = None) -> mx.array:
    """Build the boolean mask of queries at `positions (..., T, 1)` over cache columns, shape `(..., T, L)`."""
    column_ids = mx.arange(columns.start, columns.stop)
    mask = column_ids <= positions
    return mask if window is None else mask & (column_ids > positions - window)


def tile_of_mask(mask: Mask, *, num_queries: int, num_columns: int, tile: range) -> mx.array | None:
    """Return a mask's part over the columns of a tile, to broadcast to `(B, Hk, Hq / Hk, T, tile)`.

    Args:
        mask: broadcast to `(B, 1, T, L)`, or to `(T, L)`; `"causal"` aligns the last query with the last column.
        num_queries: T.
        num_columns: L.
        tile: the columns wanted.

    Returns:
        None where every query sees every column of the tile.
    """
    if mask is None:
        return None
    if isinstance(mask, str):
        first = num_columns - num_queries
        if tile.stop <= first + 1:
            return None
        return causal_mask(mx.arange(first, num_columns)[:, None], tile)
    part = mask[..., tile.start : tile.stop]
    return part[:, :, None] if part.ndim == 4 else part
