"""Attention that walks the cache in tiles, so that the scores of a long context are never there as a whole."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from headrace_kvcache.masks import Mask, tile_of_mask
from headrace_kvcache.softmax import OnlineSoftmax

# On CPU a quantized product copies the tile it reads, and several tiles of a layer are alive together; on a GPU many
# small tiles would cost many launches.
_MAX_TILE_CPU = 256
_MAX_TILE_GPU = 4096
_MIN_TILE = 256
_SCORES_PER_TILE = 1 << 22


class Tiles(Protocol):
    """Keys and values of L columns, in whatever form, that answer for one tile of columns at a time."""

    @property
    def num_columns(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def dtype(self) -> mx.Dtype: ...

    def scores(self, queries: mx.array, tile: range) -> mx.array:
        """Return the products of `queries (B, Hk, R, D)` with the tile's keys, `(B, Hk, R, tile)`."""
        ...

    def outputs(self, weights: mx.array, tile: range) -> mx.array:
        """Return the products of `weights (B, Hk, R, tile)` with the tile's values, `(B, Hk, R, Dv)`."""
        ...


def tiled_attention(
    queries: mx.array,
    tiles: Tiles,
    *,
    scale: float,
    mask: Mask,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Attend over tiles with an online softmax in float32.

    Args:
        queries: `(B, Hq, T, D)`.
        tiles: keys and values of Hk heads, Hq a multiple of Hk.
        scale: factor of the scores.
        mask: boolean, broadcast to `(B, 1, T, L)`; `"causal"` aligns the last query with the last column; None.
        sinks: `(Hq,)` logits that take part in the softmax and carry no value.
        softcap: bounds the scaled scores to `softcap * tanh(scores / softcap)`.

    Returns:
        `(B, Hq, T, Dv)` in the queries' dtype. A query that sees no column gets zeros.
    """
    batch, num_heads, num_queries, head_dim = queries.shape
    num_kv_heads, num_columns = tiles.num_kv_heads, tiles.num_columns
    grouped = queries.reshape(batch, num_kv_heads, -1, head_dim)
    # Masks broadcast to the shape that tells the heads of one key head apart from the positions.
    spread = (batch, num_kv_heads, num_heads // num_kv_heads, num_queries)
    softmax = OnlineSoftmax(None if sinks is None else sinks.reshape(num_kv_heads, -1, 1, 1))
    for tile in _tiles(batch * num_heads * num_queries, num_columns):
        scores = tiles.scores(grouped, tile).astype(mx.float32).reshape(*spread, len(tile)) * scale
        if softcap is not None:
            scores = softcap * mx.tanh(scores / softcap)
        seen = tile_of_mask(mask, num_queries=num_queries, num_columns=num_columns, tile=tile)
        if seen is not None:
            scores = mx.where(seen, scores, -mx.inf)
        weights = softmax.weigh(scores).astype(tiles.dtype).reshape(*grouped.shape[:3], len(tile))
        softmax.add(tiles.outputs(weights, tile).reshape(*spread, -1))
    return softmax.result().astype(queries.dtype).reshape(batch, num_heads, num_queries, -1)


def _tiles(num_rows: int, num_columns: int) -> list[range]:
    largest = _MAX_TILE_CPU if mx.default_device().type == mx.DeviceType.cpu else _MAX_TILE_GPU
    size = max(_MIN_TILE, min(largest, _SCORES_PER_TILE // num_rows // _MIN_TILE * _MIN_TILE))
    return [range(start, min(start + size, num_columns)) for start in range(0, num_columns, size)]
