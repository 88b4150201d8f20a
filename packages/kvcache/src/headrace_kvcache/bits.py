"""Little-endian streams of small integers in 32-bit words; an integer may straddle two words."""

from __future__ import annotations

import mlx.core as mx

_WORD = 32


def pack_bits(indices: mx.array, bits: int) -> mx.array:
    """Pack `(..., D)` integers below 2 ** bits, D a multiple of 32, into `(..., D * bits / 32)` words, uint32."""
    spread = (indices[..., None] >> mx.arange(bits, dtype=mx.uint32)) & 1
    by_word = spread.reshape(*indices.shape[:-1], -1, _WORD)
    return (by_word << mx.arange(_WORD, dtype=mx.uint32)).sum(axis=-1).astype(mx.uint32)


def unpack_bits(words: mx.array, bits: int) -> mx.array:
    """Return the `(..., D)` integers, uint32, that `pack_bits` packed into words."""
    num_words = words.shape[-1]
    starts = [place * bits for place in range(num_words * _WORD // bits)]
    word_ids = mx.array([start // _WORD for start in starts], mx.uint32)
    shifts = mx.array([start % _WORD for start in starts], mx.uint32)
    low = words[..., word_ids] >> shifts
    if _WORD % bits == 0:
        return low & ((1 << bits) - 1)
    # In two steps, because a shift by a whole word is undefined.
    high = (words[..., mx.minimum(word_ids + 1, num_words - 1)] << (_WORD - 1 - shifts)) << 1
    return (low | high) & ((1 << bits) - 1)
