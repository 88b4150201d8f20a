"""Draws over the whole vocabulary: plain and XTC rows, and rows that a tone curve reshapes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx

from headrace_sampling.curves import HlgCurve, ToneCurve
from headrace_sampling.filters import drop_top_choices
from headrace_sampling.layout import column, count_filters, row_replacement, share_filters, temperatures
from headrace_sampling.noise import key_words, vocabulary_noise
from headrace_sampling.seeds import mix_seed, unit_interval
from headrace_sampling.tone import apply_hlg, apply_tone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_sampling.params import SamplingParams

# Of the independent keys that a step's key is mixed into, the first; the second is for the noise of candidates.
_XTC_INDEX = 1
# The slope of a curve stays finite in float32.
_MIN_TEMPERATURE = 1e-6


class PlainDraw:
    """Draws from the softmax of the filtered scores over the temperature.

    Args:
        params: one per row.
        exempt: tokens that XTC never excludes, one collection per row.
        vocab_size: V.
    """

    def __init__(self, params: Sequence[SamplingParams], exempt: Sequence[Sequence[int]], vocab_size: int) -> None:
        self._before = share_filters(params)
        self._after = count_filters(params, vocab_size)
        self._temperatures = temperatures(params)
        self._xtc = [(row, entry) for row, entry in enumerate(params) if entry.xtc_probability]
        self._exempt = _marks([exempt[row] for row, _ in self._xtc], vocab_size)
        rows = [row for row, _ in self._xtc]
        self._xtc_ids = None if len(rows) == len(params) else mx.array(rows, mx.int32)
        self._replace = row_replacement(rows, len(params))

    def __call__(self, scores: mx.array, keys: Sequence[int]) -> mx.array:
        """Pick a token per row, `(R,) int32`, lazily, from `scores (R, V) float32` whose best is 0."""
        noisy = self.weigh(scores, keys) + vocabulary_noise(key_words(keys), scores.shape[-1])
        return mx.argmax(noisy, axis=-1).astype(mx.int32)

    def weigh(self, scores: mx.array, keys: Sequence[int]) -> mx.array:
        """Return the scores `(R, V)` whose softmax is drawn from; whether XTC excludes is up to the keys."""
        for keep in self._before:
            scores = keep(scores)
        scores = self._without_top_choices(scores, keys)
        for keep in self._after:
            scores = keep(scores)
        return scores / self._temperatures

    def _without_top_choices(self, scores: mx.array, keys: Sequence[int]) -> mx.array:
        excludes = [unit_interval(mix_seed(keys[row], _XTC_INDEX)) < entry.xtc_probability for row, entry in self._xtc]
        if not any(excludes):
            return scores
        # All XTC rows take part, so that arrays keep their shapes: above infinity nothing is dropped.
        thresholds = column(
            _log(entry.xtc_threshold) if drops else math.inf
            for drops, (_, entry) in zip(excludes, self._xtc, strict=True)
        )
        if self._xtc_ids is None:
            return drop_top_choices(scores, thresholds, self._exempt)
        return self._replace(scores, drop_top_choices(scores[self._xtc_ids], thresholds, self._exempt))


class CurveDraw:
    """Draws from the softmax of a tone curve of the log-probabilities.

    Args:
        params: one per row, each with a curve.
    """

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        groups: dict[_Shape, list[int]] = {}
        for row, entry in enumerate(params):
            groups.setdefault(_shape(entry), []).append(row)
        self._shapes = [(shape, mx.array(rows, mx.int32)) for shape, rows in groups.items()]
        # Where each row is, once the groups are laid one after the other.
        self._order = mx.argsort(mx.concatenate([rows for _, rows in self._shapes]))

    def __call__(self, scores: mx.array, keys: Sequence[int]) -> mx.array:
        """Pick a token per row, `(R,) int32`, lazily, from `scores (R, V) float32` whose best is 0."""
        noisy = self.weigh(scores) + vocabulary_noise(key_words(keys), scores.shape[-1])
        return mx.argmax(noisy, axis=-1).astype(mx.int32)

    def weigh(self, scores: mx.array) -> mx.array:
        """Return the scores `(R, V)` whose softmax is drawn from."""
        logprobs = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
        if len(self._shapes) == 1:
            return _curved(logprobs, self._shapes[0][0])
        parts = [_curved(logprobs[rows], shape) for shape, rows in self._shapes]
        return mx.concatenate(parts)[self._order]


_Shape: TypeAlias = "tuple[ToneCurve | HlgCurve, float]"


def _shape(params: SamplingParams) -> _Shape:
    if params.curve is not None:
        return params.curve, 1.0
    assert params.hlg is not None, "a row without a curve is drawn plainly"
    gain = params.hlg.gain
    return params.hlg, 1 / max(params.temperature, _MIN_TEMPERATURE) if gain is None else gain


def _curved(logprobs: mx.array, shape: _Shape) -> mx.array:
    curve, gain = shape
    return apply_hlg(logprobs, curve, gain) if isinstance(curve, HlgCurve) else apply_tone(logprobs, curve)


def _log(value: float) -> float:
    return math.log(value) if value else -math.inf


def _marks(token_ids: Sequence[Sequence[int]], vocab_size: int) -> mx.array | None:
    """Mark tokens of the vocabulary, `(R, V) bool`; None if there are none."""
    entries = [(row, one) for row, ids in enumerate(token_ids) for one in ids if one < vocab_size]
    if not entries:
        return None
    rows, ids = zip(*entries, strict=True)
    counts = mx.zeros((len(token_ids), vocab_size), mx.int32).at[mx.array(rows), mx.array(ids)].add(1)
    return counts > 0
