"""The sampling chain of a fixed set of rows: parameters laid out as arrays once, applied every step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_sampling.errors import InvalidSamplingParams
from headrace_sampling.filters import keep_min_p, keep_top_k, keep_top_p

if TYPE_CHECKING:
    from headrace_sampling.params import SamplingParams

# Below this every score but the best underflows anyway, and the division stays finite in float32.
_MIN_TEMPERATURE = 1e-30

Filter = Callable[[mx.array], mx.array]


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise `InvalidSamplingParams` for a logit bias outside the vocabulary."""
    if params.logit_bias and params.logit_bias[-1][0] >= vocab_size:
        token_id = params.logit_bias[-1][0]
        raise InvalidSamplingParams("logit_bias", token_id, f"keyed by token ids from 0 to {vocab_size - 1}")


class SamplingChain:
    """Picks one token per row. Every row gets the token that it would get alone, bit for bit.

    A filter runs only on the rows that use it; rows that use none of it cost nothing, and a batch of greedy rows
    is a single argmax.

    Args:
        params: one entry per row.
        vocab_size: V.

    Raises:
        InvalidSamplingParams: a logit bias outside the vocabulary.
    """

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int) -> None:
        for entry in params:
            check_vocabulary(entry, vocab_size)
        drawing = [row for row, entry in enumerate(params) if not entry.is_greedy]
        self.drawing_rows = tuple(drawing)
        self._bias = _bias(params)
        self._drawing_ids = None if len(drawing) == len(params) else mx.array(drawing, mx.int32)
        drawn = [params[row] for row in drawing]
        self._filters = _filters(drawn, vocab_size)
        temperatures = [[max(entry.temperature, _MIN_TEMPERATURE)] for entry in drawn]
        self._temperatures = mx.array(temperatures, mx.float32)

    def pick(self, logits: mx.array, keys: Sequence[int]) -> mx.array:
        """Pick the tokens of one step, lazily.

        Args:
            logits: `(B, V)` floating point.
            keys: one 64-bit key per drawing row, in the order of `drawing_rows`.

        Returns:
            `(B,) int32`.
        """
        if self._bias is not None:
            rows, token_ids, values = self._bias
            logits = logits.astype(mx.float32).at[rows, token_ids].add(values)
        if not self.drawing_rows:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        if self._drawing_ids is None:
            return self._draw(logits, keys)
        greedy = mx.argmax(logits, axis=-1).astype(mx.int32)
        greedy[self._drawing_ids] = self._draw(logits[self._drawing_ids], keys)
        return greedy

    def _draw(self, logits: mx.array, keys: Sequence[int]) -> mx.array:
        scores = logits.astype(mx.float32)
        best = mx.max(scores, axis=-1, keepdims=True)
        # Equality first, so that infinite logits give 0 and not NaN.
        scores = mx.where(scores == best, 0.0, scores - best)
        for keep in self._filters:
            scores = keep(scores)
        words = mx.array([(key >> 32, key & 0xFFFFFFFF) for key in keys], mx.uint32)
        # The best of scores plus Gumbel noise is a draw from their softmax (Gumbel, 1954).
        noisy = scores / self._temperatures + _gumbel_noise(words, scores.shape[-1])
        return mx.argmax(noisy, axis=-1).astype(mx.int32)


def _gumbel_noise(keys: mx.array, vocab_size: int) -> mx.array:
    """Draw `(B, V) float32` of Gumbel noise, each row from its own key of `(B, 2) uint32`."""

    def row_noise(key: mx.array) -> mx.array:
        return mx.random.gumbel((vocab_size,), key=key)

    return mx.vmap(row_noise)(keys)


def _bias(params: Sequence[SamplingParams]) -> tuple[mx.array, mx.array, mx.array] | None:
    entries = [(row, token_id, bias) for row, entry in enumerate(params) for token_id, bias in entry.logit_bias]
    if not entries:
        return None
    rows, token_ids, values = zip(*entries, strict=True)
    return mx.array(rows, mx.int32), mx.array(token_ids, mx.int32), mx.array(values, mx.float32)


def _filters(params: Sequence[SamplingParams], vocab_size: int) -> list[Filter]:
    """Lay out top-p, min-p and top-k, in this order, each over the rows that use it."""
    filters: list[Filter] = []
    top_p = {row: entry.top_p for row, entry in enumerate(params) if 0 < entry.top_p < 1}
    if top_p:
        shares = _column(top_p.values())
        filters.append(_on_rows(list(top_p), len(params), lambda scores: keep_top_p(scores, shares)))
    min_p = {row: math.log(entry.min_p) for row, entry in enumerate(params) if entry.min_p > 0}
    if min_p:
        thresholds = _column(min_p.values())
        filters.append(_on_rows(list(min_p), len(params), lambda scores: keep_min_p(scores, thresholds)))
    by_top_k: defaultdict[int, list[int]] = defaultdict(list)
    for row, entry in enumerate(params):
        if 0 < entry.top_k < vocab_size:
            by_top_k[entry.top_k].append(row)
    filters.extend(_on_rows(rows, len(params), _top_k_filter(top_k)) for top_k, rows in by_top_k.items())
    return filters


def _column(values: Iterable[float]) -> mx.array:
    return mx.array([[value] for value in values], mx.float32)


def _top_k_filter(top_k: int) -> Filter:
    return lambda scores: keep_top_k(scores, top_k)


def _on_rows(rows: list[int], num_rows: int, keep: Filter) -> Filter:
    if len(rows) == num_rows:
        return keep
    row_ids = mx.array(rows, mx.int32)

    def keep_some(scores: mx.array) -> mx.array:
        kept = mx.array(scores)
        kept[row_ids] = keep(scores[row_ids])
        return kept

    return keep_some
