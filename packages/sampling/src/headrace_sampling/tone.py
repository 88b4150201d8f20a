"""Tone curves applied to rows of log-probabilities."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_sampling.curves import FLOOR
from headrace_sampling.filters import weights

if TYPE_CHECKING:
    from headrace_sampling.curves import HlgCurve, ToneCurve

_SMALLEST = 1e-9


def apply_hlg(logprobs: mx.array, curve: HlgCurve, gain: float) -> mx.array:
    """Apply a curve with logarithmic ends; monotone, and exactly `gain * (logprobs - pivot)` without ends.

    Args:
        logprobs: `(R, V) float32`.
        curve: its own gain is ignored.
        gain: slope of the middle.

    Returns:
        `(R, V) float32` scores, whose softmax is sampled.
    """
    z = logprobs - (_pivot(logprobs, curve) - curve.pivot_offset)
    if curve.shoulder:
        beyond = (z - curve.width) / curve.shoulder
        bent = curve.width + curve.shoulder * mx.log(mx.maximum(1 + beyond, _SMALLEST))
        z = mx.where(beyond > 0, bent, z)
    if curve.toe:
        beyond = (-z - curve.width) / curve.toe
        bent = -curve.width - curve.toe * mx.log(mx.maximum(1 + beyond, _SMALLEST))
        # A token that is impossible stays so: the logarithm alone would bring it back.
        z = mx.where((beyond > 0) & (z > -mx.inf), bent, z)
    return gain * z


def _pivot(logprobs: mx.array, curve: HlgCurve) -> mx.array:
    if curve.pivot == "top":
        return mx.max(logprobs, axis=-1, keepdims=True)
    probabilities = weights(logprobs)
    if curve.pivot == "entropy":
        surprise = mx.where(probabilities > 0, probabilities * logprobs, 0.0)
        return mx.sum(surprise, axis=-1, keepdims=True)
    descending = -mx.sort(-logprobs, axis=-1)
    mass_before = mx.cumsum(weights(descending), axis=-1, inclusive=False)
    # Rounding may leave the whole vocabulary below one half only if nothing is possible: then the first is as good.
    middle = mx.maximum(mx.sum(mass_before < 0.5, axis=-1, keepdims=True) - 1, 0)
    return mx.take_along_axis(descending, middle, axis=-1)


def apply_tone(logprobs: mx.array, curve: ToneCurve) -> mx.array:
    """Apply a drawn curve, a monotone cubic in logarithms of probabilities.

    Args:
        logprobs: `(R, V) float32`.
        curve: the control points.

    Returns:
        `(R, V) float32` scores, whose softmax is sampled; impossible tokens stay so.
    """
    knots = curve.knots
    x = mx.maximum(logprobs, FLOOR)
    first_x, first_y, first_slope = knots[0]
    last_x, last_y, last_slope = knots[-1]
    # The tail keeps falling at least as fast as it did, also below the floor of the points.
    result = first_y + max(first_slope, 1.0) * (logprobs - first_x)
    for (x0, y0, m0), (x1, y1, m1) in itertools.pairwise(knots):
        width = x1 - x0
        t = (x - x0) / width
        # Cubic Hermite in Horner's form around the left knot.
        rise = y1 - y0
        a, b = m0 * width, m1 * width
        piece = y0 + t * (a + t * ((3 * rise - 2 * a - b) + t * (a + b - 2 * rise)))
        result = mx.where(logprobs >= x0, piece, result)
    result = mx.where(logprobs >= last_x, last_y + last_slope * (logprobs - last_x), result)
    return mx.where(logprobs > -mx.inf, result, logprobs)
