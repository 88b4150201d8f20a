"""Gumbel noise of a step: the best of scores plus Gumbel noise is a draw from their softmax (Gumbel, 1954).

A row's noise depends on its key alone. There are two streams: one over the whole vocabulary, which is cheap per token,
and one that gives any token's noise without drawing that of the others, for rows that look at few candidates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Sequence


def key_words(keys: Sequence[int]) -> mx.array:
    """Lay out 64-bit keys as `(R, 2) uint32`."""
    return mx.array([(key >> 32, key & 0xFFFFFFFF) for key in keys], mx.uint32)


def vocabulary_noise(words: mx.array, vocab_size: int) -> mx.array:
    """Draw the noise of every token.

    Args:
        words: `(R, 2) uint32`, one key per row.
        vocab_size: V.

    Returns:
        `(R, V) float32`; row i equals `mx.random.gumbel((V,), key=words[i])`.
    """

    def row_noise(key: mx.array) -> mx.array:
        return mx.random.gumbel((vocab_size,), key=key)

    return mx.vmap(row_noise)(words)


def token_noise(words: mx.array, token_ids: mx.array) -> mx.array:
    """Draw the noise of given tokens: a token's depends on the row's key and its id, not on which others are asked for.

    Token t draws from the row's key with t added to its low word, as a counter-based generator allows (Salmon et al.,
    2011). Keys must be well mixed: those of consecutive seeds would share noise.

    Args:
        words: `(R, 2) uint32`, one key per row.
        token_ids: `(R, C)`.

    Returns:
        `(R, C) float32`.
    """
    low = words[:, 1:] + token_ids.astype(mx.uint32)
    keys = mx.stack([mx.broadcast_to(words[:, :1], low.shape), low], axis=-1).reshape(-1, 2)
    return mx.vmap(_one_noise)(keys).reshape(low.shape)


def _one_noise(key: mx.array) -> mx.array:
    return mx.random.gumbel((), key=key)
