"""Draws of rows whose filters keep a prefix of the ranking: best token first, by top-p, min-p and top-k.

Such a row is decided by its best `NUM_CANDIDATES` tokens, which are found without sorting the vocabulary: always if
top-k keeps no more, and with top-p alone as soon as their exact share of the whole mass suffices. The rare row with a
distribution so flat that it does not is sorted whole. Either way the same tokens are kept and each has the same noise.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_sampling.filters import weights
from headrace_sampling.layout import column, filters_of, temperatures, uses_top_p
from headrace_sampling.noise import key_words, token_noise
from headrace_sampling.seeds import mix_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_sampling.params import SamplingParams

NUM_CANDIDATES = 1024
FEW_CANDIDATES = 64
"""Enough for rows whose top-k is no larger, at less than half the work."""

_BLOCK = 16
# Of the independent keys that a step's key is mixed into, the second; the first decides about XTC.
_NOISE_INDEX = 2


def is_bounded(params: SamplingParams, vocab_size: int) -> bool:
    """Whether the candidates are sure to hold all that is kept."""
    return vocab_size <= NUM_CANDIDATES or 0 < params.top_k <= NUM_CANDIDATES


def best_token_ids(scores: mx.array, count: int) -> mx.array:
    """Return the ids of the `count` best tokens of each row, `(R, count)`, in no order.

    The best tokens of a large vocabulary are in the blocks with the best maxima: only those are looked through.
    """
    num_blocks = scores.shape[-1] // _BLOCK
    if num_blocks <= 2 * count:
        return mx.argpartition(scores, kth=-count, axis=-1)[:, -count:]
    end = num_blocks * _BLOCK
    maxima = mx.max(scores[:, :end].reshape(-1, num_blocks, _BLOCK), axis=-1)
    blocks = mx.argpartition(maxima, kth=-count, axis=-1)[:, -count:]
    ids = (blocks[:, :, None] * _BLOCK + mx.arange(_BLOCK, dtype=mx.uint32)).reshape(-1, count * _BLOCK)
    rest = mx.arange(end, scores.shape[-1], dtype=mx.uint32)
    ids = mx.concatenate([ids, mx.broadcast_to(rest, (ids.shape[0], rest.size))], axis=-1) if rest.size else ids
    found = mx.argpartition(mx.take_along_axis(scores, ids, axis=-1), kth=-count, axis=-1)[:, -count:]
    return mx.take_along_axis(ids, found, axis=-1)


class RankedDraw:
    """Draws from the candidates, and from whole rows where those may not suffice.

    Args:
        params: one per row, without XTC and typical-p.
        vocab_size: V.
        num_candidates: how many of the best tokens to look at: enough for every bounded row.
        may_read: whether a step may read from the device which rows need to be sorted whole; else all unbounded ones
            are.
    """

    def __init__(
        self, params: Sequence[SamplingParams], vocab_size: int, *, num_candidates: int, may_read: bool
    ) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._unbounded = [row for row, entry in enumerate(params) if not is_bounded(entry, vocab_size)]
        self._may_read = may_read
        self._wholes: dict[tuple[int, ...], _WholeRows] = {}
        skips_candidates = bool(self._unbounded) and not may_read
        bounded = [row for row in range(len(params)) if row not in set(self._unbounded)]
        self._narrow = bounded if skips_candidates else list(range(len(params)))
        self._candidates = None
        if self._narrow:
            count = min(num_candidates, vocab_size)
            self._candidates = _Candidates([params[row] for row in self._narrow], count)

    def __call__(self, scores: mx.array, keys: Sequence[int]) -> mx.array:
        """Pick a token per row.

        Args:
            scores: `(R, V) float32`, the best of each row 0.
            keys: the step keys of the rows.

        Returns:
            `(R,) int32`, lazy unless reading is allowed and some row is unbounded.
        """
        words = key_words([mix_seed(key, _NOISE_INDEX) for key in keys])
        if self._candidates is None:
            return self._whole(range(len(keys)), scores, words)
        everything = len(self._narrow) == len(keys)
        chosen = None if everything else mx.array(self._narrow, mx.int32)
        tokens, suffices = self._candidates(
            scores if chosen is None else scores[chosen], words if chosen is None else words[chosen]
        )
        if not self._unbounded:
            return tokens
        if chosen is not None:
            whole = self._whole(self._unbounded, scores, words)
            return mx.concatenate([tokens, whole])[_inverse([*self._narrow, *self._unbounded])]
        return self._redone(tokens, suffices, scores, words)

    def _redone(self, tokens: mx.array, suffices: mx.array, scores: mx.array, words: mx.array) -> mx.array:
        flags: list[bool] = suffices.tolist()  # pyright: ignore[reportAssignmentType]
        missing = [row for row in self._unbounded if not flags[row]]
        if not missing:
            return tokens
        tokens[mx.array(missing, mx.int32)] = self._whole(missing, scores, words)
        return tokens

    def _whole(self, rows: Sequence[int], scores: mx.array, words: mx.array) -> mx.array:
        key = tuple(rows)
        if key not in self._wholes:
            # One set of rows is kept: which rows are flat changes from step to step.
            self._wholes = {key: _WholeRows([self._params[row] for row in key], self._vocab_size)}
        row_ids = mx.array(key, mx.int32)
        return self._wholes[key](scores[row_ids], words[row_ids])


class _Candidates:
    """Rows decided by their best tokens."""

    def __init__(self, params: Sequence[SamplingParams], count: int) -> None:
        self._count = count
        self._temperatures = temperatures(params)
        with_top_p = [row for row, entry in enumerate(params) if uses_top_p(entry)]
        self._top_p = column([params[row].top_p for row in with_top_p])
        self._with_top_p = None if len(with_top_p) == len(params) else mx.array(with_top_p, mx.int32)
        self._uses_top_p = bool(with_top_p)
        self._log_min_p = None
        if any(entry.min_p for entry in params):
            self._log_min_p = column([math.log(entry.min_p) if entry.min_p else -math.inf for entry in params])
        self._least = _positions([entry.min_tokens_to_keep for entry in params], self._count)
        top_k = [entry.top_k if 0 < entry.top_k < self._count else self._count for entry in params]
        self._top_k = mx.array([[count] for count in top_k], mx.int32) if min(top_k) < self._count else None

    def __call__(self, scores: mx.array, words: mx.array) -> tuple[mx.array, mx.array]:
        """Return tokens `(R,) int32`, and whether each row keeps nothing beyond its candidates `(R,) bool`."""
        ids = best_token_ids(scores, self._count)
        best = mx.take_along_axis(scores, ids, axis=-1)
        order = mx.argsort(-best, axis=-1)
        ids, best = mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(best, order, axis=-1)
        lowest = self._lowest(scores, best)
        kept = best >= lowest
        if self._top_k is not None:
            kept = kept & (mx.arange(self._count)[None] < self._top_k)
        noisy = mx.where(kept, best / self._temperatures + token_noise(words, ids), -mx.inf)
        picked = mx.argmax(noisy, axis=-1, keepdims=True)
        suffices = (best[:, -1:] < lowest)[:, 0]
        return mx.take_along_axis(ids, picked, axis=-1)[:, 0].astype(mx.int32), suffices

    def _lowest(self, scores: mx.array, best: mx.array) -> mx.array:
        """Return the lowest score that top-p and min-p keep, `(R, 1)`."""
        lowest = mx.full((best.shape[0], 1), -mx.inf)
        if self._uses_top_p:
            rows = self._with_top_p
            if rows is None:
                lowest = _nucleus_end(scores, best, self._top_p)
            else:
                lowest[rows] = _nucleus_end(scores[rows], best[rows], self._top_p)
        if self._log_min_p is None:
            return lowest
        least_p = self._log_min_p
        if self._least is not None:
            least_p = mx.minimum(least_p, mx.take_along_axis(best, self._least, axis=-1))
        return mx.maximum(lowest, least_p)


def _nucleus_end(scores: mx.array, best: mx.array, top_p: mx.array) -> mx.array:
    """Return the score of the last token that top-p keeps, or of the last candidate if it keeps more."""
    total = mx.sum(weights(scores), axis=-1, keepdims=True)
    mass_before = mx.cumsum(weights(best), axis=-1, inclusive=False)
    num_kept = mx.maximum(mx.sum(mass_before < top_p * total, axis=-1, keepdims=True), 1)
    return mx.take_along_axis(best, num_kept - 1, axis=-1)


class _WholeRows:
    """Rows whose vocabulary is sorted."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int) -> None:
        self._filters = filters_of(params, vocab_size)
        self._temperatures = temperatures(params)

    def __call__(self, scores: mx.array, words: mx.array) -> mx.array:
        for keep in self._filters:
            scores = keep(scores)
        ids = mx.broadcast_to(mx.arange(scores.shape[-1])[None], scores.shape)
        noisy = scores / self._temperatures + token_noise(words, ids)
        return mx.argmax(noisy, axis=-1).astype(mx.int32)


def _positions(counts: Sequence[int], size: int) -> mx.array | None:
    if max(counts) == 1:
        return None
    return mx.array([[min(count, size) - 1] for count in counts], mx.int32)


def _inverse(rows: Sequence[int]) -> mx.array:
    places = [0] * len(rows)
    for place, row in enumerate(rows):
        places[row] = place
    return mx.array(places, mx.int32)
