"""Filters over rows of scores: each keeps part of the vocabulary and sends the rest to minus infinity.

Scores are `(B, V)` log-probabilities, or logits shifted by any constant per row: only differences count. A filter
treats each row on its own, so a row's result never depends on its neighbours; each takes its parameters as one value
per row, `(B, 1)`. Tokens that tie with the last kept one are kept by every filter but top-k. None renormalises: a
filter after another sees what that left, with the probabilities that are its softmax.
"""

from __future__ import annotations

import math

import mlx.core as mx

_LOG2_E = math.log2(math.e)
_NOTHING = -math.inf


def weights(scores: mx.array) -> mx.array:
    """Return exp(scores), unnormalised probabilities, for float32 scores of any shape."""
    # MLX's CPU kernel of power takes a third of the time of its exp.
    return mx.power(mx.array(2.0), scores * _LOG2_E)


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
    mass = mx.cumsum(weights(wide - wide[:, -1:]), axis=-1)
    num_dropped = mx.sum(mass <= (1 - top_p) * mass[:, -1:], axis=-1, keepdims=True)
    last = mx.minimum(num_dropped, scores.shape[-1] - 1)
    return _keep_from(scores, mx.take_along_axis(ascending, last, axis=-1))


def keep_min_p(scores: mx.array, log_min_p: mx.array, min_tokens_to_keep: int = 1) -> mx.array:
    """Keep the tokens whose probability is at least `min_p` times that of the best one.

    Min-p sampling (Nguyen et al., 2024).

    Args:
        scores: `(B, V)` floating point.
        log_min_p: `(B, 1) float32`, the logarithm of min-p, at most 0.
        min_tokens_to_keep: so many of the best tokens are kept, and what ties with the last of them.

    Returns:
        `(B, V)` in the dtype of `scores`; at least one token per row is kept.
    """
    best = mx.max(scores, axis=-1, keepdims=True)
    lowest = best + log_min_p.astype(scores.dtype)
    if min_tokens_to_keep > 1:
        count = min(min_tokens_to_keep, scores.shape[-1])
        lowest = mx.minimum(lowest, mx.min(mx.topk(scores, count, axis=-1), axis=-1, keepdims=True))
    return _keep_from(scores, lowest)


def keep_top_n_sigma(scores: mx.array, num_sigmas: mx.array) -> mx.array:
    """Keep the tokens at most `num_sigmas` standard deviations of the scores below the best one.

    Top-n-sigma sampling (Tang et al., 2024). Tokens at minus infinity are no part of the deviation.

    Args:
        scores: `(B, V)` floating point.
        num_sigmas: `(B, 1) float32`, above 0.

    Returns:
        `(B, V)` in the dtype of `scores`; at least one token per row is kept.
    """
    wide = scores.astype(mx.float32)
    is_possible = wide > _NOTHING
    count = mx.maximum(mx.sum(is_possible, axis=-1, keepdims=True), 1)
    best = mx.max(wide, axis=-1, keepdims=True)
    below = mx.where(is_possible, best - wide, 0.0)
    mean = mx.sum(below, axis=-1, keepdims=True) / count
    variance = mx.sum(mx.where(is_possible, mx.square(below - mean), 0.0), axis=-1, keepdims=True) / count
    return mx.where(below > num_sigmas * mx.sqrt(variance), mx.array(_NOTHING, scores.dtype), scores)


def keep_typical(scores: mx.array, typical_p: mx.array) -> mx.array:
    """Keep the tokens whose surprise is closest to the expected one, until they hold the share `typical_p`.

    Locally typical sampling (Meister et al., 2022).

    Args:
        scores: `(B, V)` floating point; a row's probabilities are its softmax.
        typical_p: `(B, 1) float32`, above 0 and below 1.

    Returns:
        `(B, V)` in the dtype of `scores`; at least one token per row is kept.
    """
    wide = scores.astype(mx.float32)
    logprobs = wide - mx.logsumexp(wide, axis=-1, keepdims=True)
    probabilities = weights(logprobs)
    surprise = mx.where(probabilities > 0, probabilities * -logprobs, 0.0)
    distance = mx.abs(logprobs + mx.sum(surprise, axis=-1, keepdims=True))
    order = mx.argsort(distance, axis=-1)
    mass_before = mx.cumsum(mx.take_along_axis(probabilities, order, axis=-1), axis=-1, inclusive=False)
    num_kept = mx.maximum(mx.sum(mass_before < typical_p, axis=-1, keepdims=True), 1)
    farthest = mx.take_along_axis(distance, mx.take_along_axis(order, num_kept - 1, axis=-1), axis=-1)
    return mx.where(distance > farthest, mx.array(_NOTHING, scores.dtype), scores)


def drop_top_choices(scores: mx.array, log_threshold: mx.array, exempt: mx.array | None = None) -> mx.array:
    """Drop every token that is more likely than the least likely one above a threshold.

    XTC, exclude top choices (p-e-w, 2024), for rows in which the draw has decided to exclude.

    Args:
        scores: `(B, V)` floating point; a row's probabilities are its softmax.
        log_threshold: `(B, 1) float32`, the logarithm of the threshold; plus infinity drops nothing.
        exempt: `(B, V) bool`, tokens that are never dropped.

    Returns:
        `(B, V)` in the dtype of `scores`; of the tokens above the threshold at least the least likely is kept.
    """
    wide = scores.astype(mx.float32)
    best = mx.max(wide, axis=-1, keepdims=True)
    total = mx.sum(weights(wide - best), axis=-1, keepdims=True)
    is_choice = wide > best + mx.log(total) + log_threshold
    least = mx.min(mx.where(is_choice, wide, mx.inf), axis=-1, keepdims=True)
    is_dropped = wide > least
    if exempt is not None:
        is_dropped = is_dropped & ~exempt
    return mx.where(is_dropped, mx.array(_NOTHING, scores.dtype), scores)


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
    return mx.put_along_axis(scores, dropped, mx.array(_NOTHING, scores.dtype), axis=-1)


def _keep_from(scores: mx.array, lowest: mx.array) -> mx.array:
    return mx.where(scores < lowest, mx.array(_NOTHING, scores.dtype), scores)
