"""A softmax whose scores arrive tile by tile, in float32."""

from __future__ import annotations

import mlx.core as mx


class OnlineSoftmax:
    """The weighted sum of values under a softmax over columns that are never there all at once.

    For each tile call `weigh` with its scores, then `add` with the product of these weights and the tile's values.

    Args:
        sinks: logits without a value, broadcast to the scores with their last axis 1.
    """

    __slots__ = ("_correction", "_highest", "_outputs", "_sinks", "_total")

    def __init__(self, sinks: mx.array | None = None) -> None:
        self._sinks = None if sinks is None else sinks.astype(mx.float32)
        self._highest: mx.array | None = self._sinks
        self._total: mx.array | None = None
        self._outputs: mx.array | None = None
        self._correction: mx.array | None = None

    def weigh(self, scores: mx.array) -> mx.array:
        """Return the tile's weights before normalisation, of the shape of `scores (..., tile)`."""
        # The lowest finite number instead of -inf: a row whose columns are all masked must not become NaN.
        highest = mx.maximum(mx.max(scores, axis=-1, keepdims=True), mx.finfo(mx.float32).min)
        if self._highest is not None:
            highest = mx.maximum(highest, self._highest)
        weights = mx.exp(scores - highest)
        total = mx.sum(weights, axis=-1, keepdims=True)
        self._correction = None
        if self._total is not None and self._highest is not None:
            self._correction = mx.exp(self._highest - highest)
            total = total + self._total * self._correction
        elif self._sinks is not None:
            total = total + mx.exp(self._sinks - highest)
        self._highest, self._total = highest, total
        return weights

    def add(self, outputs: mx.array) -> None:
        """Add the tile's part `(..., Dv)` of the weighted sum."""
        outputs = outputs.astype(mx.float32)
        if self._outputs is not None and self._correction is not None:
            outputs = outputs + self._outputs * self._correction
        self._outputs = outputs

    def result(self) -> mx.array:
        """Return the weighted mean `(..., Dv)` in float32; zeros where nothing was seen."""
        if self._outputs is None or self._total is None:
            raise ValueError("no tile was added; a softmax needs at least one column")
        # The total is at least about 1 where anything was seen, so the floor changes nothing there.
        return self._outputs / mx.maximum(self._total, 0.5)
