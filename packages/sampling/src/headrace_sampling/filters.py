"""Filters over rows of scores: each keeps part of the vocabulary and sends the rest to minus infinity.

Scores are `(B, V)` log-probabilities, or logits shifted by any constant per row: only differences count. A filter
treats each row on its own, so a row's result never depends on its neighbours, and tokens that tie with the last
kept one are kept by top-p and min-p. None of them renormalises.
"""

from __future__ import annotations

import mlx.core as mx


def keep_top_p(scores: mx.array, top_p: mx.array) -> mx.array:
    """Keep the smallest set of best tokens that holds at least the share `top_p` of the probability.

    Nucleus sampling (Holtzman et al., 2019).

    Args:
        scores: `(B, V)` floating point; a row's probabilities are its softmax.
        top_p: `(B, 1) float32`, above 0 and below 1.

    Returns:
        `(B, V)` in the dtype of `scores`; at least one token per row is kept.
    """
    ascending = mx.sort(scores, axis=-1)
    wide = ascending.astype(mx.float32)
    # Summed from the unlikely end, where the terms are small: the dropped mass is exact enough for any vocabulary.
    mass = mx.cumsum(mx.exp(wide - wide[:, -1:]), axis=-1)
    num_dropped = mx.sum(mass <= (1 - top_p) * mass[:, -1:], axis=-1, keepdims=True)
    last = mx.minimum(num_dropped, scores.shape[-1] - 1)
    return _keep_from(scores, mx.take_along_axis(ascending, last, axis=-1))


def keep_min_p(scores: mx.array, log_min_p: mx.array) -> mx.array:
    """Keep the tokens whose probability is at least `min_p` times that of the best one.

    Min-p sampling (Nguyen et al., 2024).

    Args:
        scores: `(B, V)` floating point.
        log_min_p: `(B, 1) float32`, the logarithm of min-p, at most 0.

    Returns:
        `(B, V)` in the dtype of `scores`; at least one token per row is kept.
    """
    best = mx.max(scores, axis=-1, keepdims=True)
    return _keep_from(scores, best + log_min_p.astype(scores.dtype))


def keep_top_k(scores: mx.array, top_k: int) -> mx.array:
    """Keep exactly the `top_k` best tokens of each row.

    Args:
        scores: `(B, V)` floating point.
        top_k: how many to keep, from 1; V or more keeps all.

    Returns:
        `(B, V)` in the dtype of `scores`.
    """
    if top_k >= scores.shape[-1]:
        return scores
    dropped = mx.argpartition(-scores, kth=top_k - 1, axis=-1)[:, top_k:]
    return mx.put_along_axis(scores, dropped, mx.array(-mx.inf, scores.dtype), axis=-1)


def _keep_from(scores: mx.array, lowest: mx.array) -> mx.array:
    return mx.where(scores < lowest, mx.array(-mx.inf, scores.dtype), scores)
