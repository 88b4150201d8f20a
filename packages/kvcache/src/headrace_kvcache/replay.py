"""Replaying the kept part of a round over recurrent layers, whose sums cannot forget their last terms (K-94)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx

from headrace_kvcache.errors import RoundRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Arrays: TypeAlias = "list[mx.array | None]"
# From a layer's arrays `(B, ...)` before a step and what of the step stays to the arrays after that.
Replay: TypeAlias = "Callable[[Arrays, Kept], Arrays]"


class Kept:
    """How many of a step's positions stay in each row; all layers share its arrays.

    Args:
        counts: a number per row.

    Attributes:
        counts: a number per row.
    """

    __slots__ = ("_lengths", "_masks", "counts")

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self._lengths: mx.array | None = None
        self._masks: dict[tuple[int, int], mx.array] = {}

    @property
    def lengths(self) -> mx.array:
        """The counts, `(B,) int32`."""
        if self._lengths is None:
            self._lengths = mx.array(self.counts, mx.int32)
        return self._lengths

    def mask(self, num_tokens: int, *, ndim: int = 2) -> mx.array:
        """Return which of the step's positions stay, `(B, num_tokens)` and axes of length 1 up to `ndim`."""
        key = num_tokens, ndim
        if key not in self._masks:
            mask = mx.arange(num_tokens) < self.lengths[:, None]
            self._masks[key] = mask.reshape(*mask.shape, *[1] * (ndim - 2))
        return self._masks[key]


def untold() -> RoundRefusedError:
    """Return what a rollback over a layer that did not tell how to replay raises."""
    return RoundRefusedError(
        "a recurrent layer did not tell its cache how to replay the step, so only a round that keeps everything can "
        "end; have the layer call record()"
    )


def kept_of_steps(steps: Iterable[tuple[int, ...]], keeps: Sequence[int]) -> list[Kept | None]:
    """Share the positions that stay among steps, first steps first.

    Args:
        steps: per step, how many positions each row summed up.
        keeps: per row, how many positions stay.

    Returns:
        Per step which of its positions stay; None for a step of which nothing does.
    """
    remaining, shares = keeps, list[Kept | None]()
    for counts in steps:
        kept = [min(count, left) for count, left in zip(counts, remaining, strict=True)]
        remaining = [left - count for left, count in zip(remaining, kept, strict=True)]
        shares.append(Kept(kept) if any(kept) else None)
    return shares
