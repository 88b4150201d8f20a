"""Replaying the kept part of a round over recurrent layers, whose sums cannot forget their last terms (K-94)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Concatenate, TypeAlias, TypeVar

import mlx.core as mx

from headrace_kvcache.errors import RoundRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Arrays: TypeAlias = "list[mx.array | None]"
# From a layer's arrays `(B, ...)` before a step, what of the step stays, and the step's inputs if the layer handed
# them over, to the arrays after that.
Replay: TypeAlias = "Callable[Concatenate[Arrays, Kept, ...], Arrays]"
# What a layer told of one step: a replay and its inputs.
Recorded: TypeAlias = "tuple[Replay, tuple[mx.array, ...]]"


_Told = TypeVar("_Told")


class Kept:
    """How many of a step's positions stay in each row; layers and rounds that keep the same share its arrays.

    Args:
        counts: a number per row.
        times: how many layers' rows lie behind each other; the counts are those of one.

    Attributes:
        num_rows: B.
    """

    __slots__ = ("_once", "_times", "num_rows")

    def __init__(self, counts: Sequence[int], *, times: int = 1) -> None:
        self._once, self._times = tuple(counts), times
        self.num_rows = len(self._once) * times

    def times(self, num_layers: int) -> Kept:
        """Return what stays of as many layers' rows, one layer behind the other."""
        return self if num_layers == 1 else Kept(self._once, times=num_layers)

    @property
    def counts(self) -> tuple[int, ...]:
        """A number per row."""
        return self._once * self._times

    @property
    def lengths(self) -> mx.array:
        """The counts, `(B,) int32`."""
        return _lengths(self._once, self._times)

    def mask(self, num_tokens: int, *, ndim: int = 2) -> mx.array:
        """Return which of the step's positions stay, `(B, num_tokens)` and axes of length 1 up to `ndim`."""
        return _mask(self._once, self._times, num_tokens, ndim)


# Every layer of a round asks for the same few arrays, and rows of their own rounds for those of rounds before. Arrays
# made of Python's numbers hold them at once, so that any thread may use them.
@lru_cache(maxsize=64)
def _lengths(counts: tuple[int, ...], times: int) -> mx.array:
    return mx.array(counts * times, mx.int32)


@lru_cache(maxsize=64)
def _mask(counts: tuple[int, ...], times: int, num_tokens: int, ndim: int) -> mx.array:
    # Bytes become an array in one call; comparing positions with lengths would take four operations.
    rows = b"".join([(b"\1" * count).ljust(num_tokens, b"\0")[:num_tokens] for count in counts]) * times
    shape = [len(counts) * times, num_tokens, *[1] * (ndim - 2)]
    return mx.array(memoryview(rows).cast("?", shape))  # pyright: ignore[reportArgumentType]


def untold() -> RoundRefusedError:
    """Return what a rollback over a layer that did not tell how to replay raises."""
    return RoundRefusedError(
        "a recurrent layer did not tell its cache how to replay the step, so only a round that keeps everything can "
        "end; have the layer call record()"
    )


def kept_steps(steps: Sequence[tuple[tuple[int, ...], _Told]], keeps: Sequence[int]) -> list[tuple[_Told, Kept]]:
    """Share the positions that stay among steps, first steps first.

    Args:
        steps: per step, how many positions each row summed up, and what was told of it.
        keeps: per row, how many positions stay, at most those of all steps.

    Returns:
        The steps of which something stays: what was told of each, and what stays.
    """
    remaining, shares = keeps, list[tuple[_Told, Kept]]()
    for counts, told in steps:
        kept = remaining
        if len(steps) > 1:
            kept = [min(count, left) for count, left in zip(counts, remaining, strict=True)]
            remaining = [left - count for left, count in zip(remaining, kept, strict=True)]
        if any(kept):
            shares.append((told, Kept(kept)))
    return shares
