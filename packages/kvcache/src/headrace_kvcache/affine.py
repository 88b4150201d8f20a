"""Affine quantization of keys and values, and attention over the packed bits.

A quantized array is a triple (packed, scales, biases). Groups run along the head dimension, never along the tokens,
so that any token slice of a triple is the triple of that slice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx

from headrace_kvcache.errors import InvalidGeometry
from headrace_kvcache.tiles import tiled_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_kvcache.masks import Mask

Triple: TypeAlias = tuple[mx.array, mx.array, mx.array]

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)

_WORD_BITS = 32
# From this many query rows per key head on, unpacking a tile once beats unpacking it for every row.
_DENSE_ROWS = 10


def check_format(bits: int, group_size: int) -> None:
    """Raise `InvalidGeometry` unless MLX packs this number of bits in groups of this size."""
    if type(bits) is not int or bits not in BITS:
        raise InvalidGeometry(f"bits is {bits!r}; it must be one of {', '.join(map(str, BITS))}")
    if type(group_size) is not int or group_size not in GROUP_SIZES:
        raise InvalidGeometry(f"group_size is {group_size!r}; it must be one of {', '.join(map(str, GROUP_SIZES))}")


def check_head_dim(head_dim: int, group_size: int) -> None:
    """Raise `InvalidGeometry` unless a head is made of whole groups."""
    if head_dim % group_size:
        raise InvalidGeometry(
            f"the head size {head_dim} is no multiple of the group size {group_size}; choose a smaller group or keep "
            f"this layer unquantized"
        )


def quantize(array: mx.array, *, bits: int, group_size: int) -> Triple:
    """Quantize `(..., D)` in groups along the last axis.

    Returns:
        packed `(..., D * bits / 32)` in uint32, scales and biases `(..., D / group_size)` in the array's dtype.

    Raises:
        InvalidGeometry: unknown bits or group size, or D no multiple of the group size.
    """
    check_format(bits, group_size)
    check_head_dim(array.shape[-1], group_size)
    packed, scales, biases = mx.quantize(array, group_size=group_size, bits=bits)
    return packed, scales, biases


def dequantize(triple: Triple, *, bits: int, group_size: int) -> mx.array:
    """Return what a triple stands for, `(..., D)` in the dtype of its scales."""
    return mx.dequantize(*triple, group_size=group_size, bits=bits)


def quantized_zeros(shape: tuple[int, ...], dtype: mx.Dtype, *, bits: int, group_size: int) -> Triple:
    """Return a triple of zeros that stands for an array of `shape (..., D)` in `dtype`."""
    *lead, head_dim = shape
    groups = (*lead, head_dim // group_size)
    packed = mx.zeros((*lead, head_dim * bits // _WORD_BITS), mx.uint32)
    return packed, mx.zeros(groups, dtype), mx.zeros(groups, dtype)


def slice_tokens(triple: Triple, start: int, stop: int) -> Triple:
    """Return views of the positions `[start, stop)` of a triple, tokens on the second axis from the right."""
    packed, scales, biases = triple
    return packed[..., start:stop, :], scales[..., start:stop, :], biases[..., start:stop, :]


def concatenate_tokens(triples: Sequence[Triple]) -> Triple:
    """Join triples along their tokens."""
    packed, scales, biases = (mx.concatenate(list(parts), axis=-2) for parts in zip(*triples, strict=True))
    return packed, scales, biases


def triple_nbytes(triple: Triple) -> int:
    """Bytes of the three arrays."""
    return sum(part.nbytes for part in triple)


def quantized_attention(
    queries: mx.array,
    keys: Triple,
    values: Triple,
    *,
    scale: float,
    mask: Mask,
    bits: int,
    group_size: int,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Attend over quantized keys and values without unpacking more than one tile of them.

    The token axis is walked in tiles with an online softmax in float32: neither the scores nor the keys of a long
    context are ever there as a whole.

    Args:
        queries: `(B, Hq, T, D)`.
        keys: triple of `(B, Hk, L, D)`, Hq a multiple of Hk.
        values: triple of `(B, Hk, L, Dv)`.
        scale: factor of the scores.
        mask: boolean, broadcast to `(B, Hq, T, L)`; `"causal"` aligns the last query with the last column; None.
        bits: bits per element of both triples.
        group_size: elements per scale and bias.
        sinks: `(Hq,)` logits that take part in the softmax and carry no value.
        softcap: bounds the scaled scores to `softcap * tanh(scores / softcap)`.

    Returns:
        `(B, Hq, T, Dv)` in the queries' dtype. A query that sees no column gets zeros.
    """
    tiles = _AffineTiles(keys, values, bits=bits, group_size=group_size, num_rows=_rows_per_key_head(queries, keys))
    asked = queries.astype(tiles.dtype)
    outputs = tiled_attention(asked, tiles, scale=scale, mask=mask, sinks=sinks, softcap=softcap)
    return outputs.astype(queries.dtype)


def _rows_per_key_head(queries: mx.array, keys: Triple) -> int:
    return queries.shape[1] // keys[0].shape[1] * queries.shape[2]


class _AffineTiles:
    """Products on the packed bits for few query rows, on the unpacked tile for many."""

    __slots__ = ("_bits", "_group_size", "_is_dense", "_keys", "_values", "dtype", "num_columns", "num_kv_heads")

    def __init__(self, keys: Triple, values: Triple, *, bits: int, group_size: int, num_rows: int) -> None:
        self._keys = keys
        self._values = values
        self._bits = bits
        self._group_size = group_size
        self._is_dense = num_rows >= _DENSE_ROWS
        # MLX's CPU kernels add up in the element type: float32 is as accurate as its GPU kernels, and ten times faster.
        self.dtype = mx.float32 if mx.default_device().type == mx.DeviceType.cpu else values[1].dtype
        self.num_kv_heads, self.num_columns = keys[0].shape[1], keys[0].shape[2]

    def scores(self, queries: mx.array, tile: range) -> mx.array:
        keys = self._tile_of(self._keys, tile)
        if self._is_dense:
            return queries @ self._unpacked(keys).swapaxes(-1, -2)
        return mx.quantized_matmul(queries, *keys, transpose=True, group_size=self._group_size, bits=self._bits)

    def outputs(self, weights: mx.array, tile: range) -> mx.array:
        values = self._tile_of(self._values, tile)
        if self._is_dense:
            return weights @ self._unpacked(values)
        return mx.quantized_matmul(weights, *values, transpose=False, group_size=self._group_size, bits=self._bits)

    def _tile_of(self, triple: Triple, tile: range) -> Triple:
        packed, scales, biases = slice_tokens(triple, tile.start, tile.stop)
        return packed, scales.astype(self.dtype), biases.astype(self.dtype)

    def _unpacked(self, triple: Triple) -> mx.array:
        return mx.dequantize(*triple, group_size=self._group_size, bits=self._bits)
