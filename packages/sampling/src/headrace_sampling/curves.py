"""Tone curves as values: how a row reshapes its distribution instead of temperature and filters. No arrays here."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from attrs import field, frozen

from headrace_sampling.errors import InvalidSamplingParams
from headrace_sampling.validation import as_number, number, number_or_zero, optional

if TYPE_CHECKING:
    from collections.abc import Iterable

Pivot: TypeAlias = Literal["top", "entropy", "median"]
Points: TypeAlias = tuple[tuple[float, float], ...]

_PIVOTS = ("top", "entropy", "median")
FLOOR = math.log(1e-6)
"""Natural logarithm of the lowest probability that a control point can name."""


def _pivot(value: Pivot) -> Pivot:
    if value not in _PIVOTS:
        raise InvalidSamplingParams("hlg.pivot", value, "'top', 'entropy' or 'median'")
    return value


@frozen(kw_only=True)
class HlgCurve:
    """A tone curve with a linear middle and logarithmic ends, on the log-probabilities.

    With z the distance of a log-probability from the pivot, the curve is `gain * z` while |z| is at most `width`,
    and continues with the same slope as `gain * beta * log(1 + d / beta)`, d the distance beyond, above (`shoulder`)
    and below (`toe`). It is monotone, so the best token stays the best. Named after hybrid log-gamma of video.

    Attributes:
        pivot: where z is 0, before the offset: `top` is the best log-probability, `entropy` the mean one, `median` that
            of the token in which the mass from the best on reaches one half.
        pivot_offset: how far below that the pivot lies, in nats.
        width: half the width of the linear middle, in nats.
        shoulder: beta above the middle; 0 goes on linearly.
        toe: beta below the middle; 0 goes on linearly. Without both ends the curve is a temperature.
        gain: slope of the middle; None is 1 / temperature.

    Raises:
        InvalidSamplingParams: names the field, its value and the allowed range.
    """

    pivot: Pivot = field(default="top", converter=_pivot)
    pivot_offset: float = field(default=6.0, converter=number("hlg.pivot_offset", -1e3, 1e3))
    width: float = field(default=4.0, converter=number("hlg.width", 0, 1e3))
    shoulder: float = field(default=4.0, converter=number_or_zero("hlg.shoulder", 1e-3, 1e3, " for a straight end"))
    toe: float = field(default=6.0, converter=number_or_zero("hlg.toe", 1e-3, 1e3, " for a straight end"))
    gain: float | None = field(default=None, converter=optional(number("hlg.gain", 1e-6, 1e6)))


def _point(value: object) -> tuple[float, float]:
    allowed = "pairs of percentages (probability, probability wanted), each from 0.0001 to 100"
    pair = cast("tuple[object, ...]", tuple(value)) if isinstance(value, (list, tuple)) else ()  # pyright: ignore[reportUnknownArgumentType]
    if len(pair) != 2:
        raise InvalidSamplingParams("curve.points", value, allowed)
    x, y = (as_number("curve.points", part, 1e-4, 100, allowed) for part in pair)
    return x, y


def _points(value: Iterable[tuple[float, float]]) -> Points:
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        raise InvalidSamplingParams("curve.points", value, "at least two pairs of percentages")
    points = tuple(sorted(map(_point, cast("Iterable[object]", value))))
    for (x, y), (next_x, next_y) in itertools.pairwise(points):
        if math.log(next_x) - math.log(x) < 1e-9:
            raise InvalidSamplingParams("curve.points", value, "given once per probability")
        if next_y < y:
            raise InvalidSamplingParams("curve.points", value, "monotone: no point lower than the one before it")
    return points


@frozen(kw_only=True)
class ToneCurve:
    """A drawn curve from a token's probability to the one wanted, both before renormalising.

    A monotone cubic through the control points, in logarithms of probabilities (Fritsch and Carlson, 1980). Below the
    lowest point it goes on with a slope of at least 1, so that the tail stays small; above the highest with the end's
    own slope. Points on the diagonal leave the distribution as it is.

    Attributes:
        points: at least two pairs of percentages `(probability, wanted)` from 0.0001 to 100, kept sorted; a higher
            probability may not get a lower one.

    Raises:
        InvalidSamplingParams: too few points, a pair outside the range, or a curve that falls.
    """

    points: Points = field(converter=_points)

    @property
    def knots(self) -> tuple[tuple[float, float, float], ...]:
        """The points as (ln probability, ln wanted, slope), from the lowest up."""
        xs = [math.log(x / 100) for x, _ in self.points]
        ys = [math.log(y / 100) for _, y in self.points]
        return tuple(zip(xs, ys, _slopes(xs, ys), strict=True))


def _slopes(xs: list[float], ys: list[float]) -> list[float]:
    """Slopes at the knots that keep each piece monotone (Fritsch and Carlson, 1980)."""
    secants = [
        (y1 - y0) / (x1 - x0) for (x0, x1), (y0, y1) in zip(itertools.pairwise(xs), itertools.pairwise(ys), strict=True)
    ]
    middle = [(a + b) / 2 if a * b > 0 else 0.0 for a, b in itertools.pairwise(secants)]
    slopes = [secants[0], *middle, secants[-1]]
    for index, secant in enumerate(secants):
        if secant == 0:
            slopes[index] = slopes[index + 1] = 0.0
            continue
        radius = math.hypot(slopes[index] / secant, slopes[index + 1] / secant)
        if radius > 3:
            slopes[index] *= 3 / radius
            slopes[index + 1] *= 3 / radius
    return slopes
