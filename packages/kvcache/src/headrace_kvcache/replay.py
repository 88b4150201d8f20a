"""Replaying the kept part of a round over recurrent layers, whose sums cannot forget their last terms (K-94)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import mlx.core as mx

from headrace_kvcache.errors import RoundRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Arrays: TypeAlias = "list[mx.array | None]"
# From a layer's arrays `(B, ...)` before a step and how many of its positions stay `(B,)` to the arrays after these.
Replay: TypeAlias = "Callable[[Arrays, mx.array], Arrays]"


class RecordedStep(NamedTuple):
    """One step of one layer in the course of a round.

    Attributes:
        counts: positions that each row summed up.
        replay: how to sum up the first of them again; None if the layer did not tell.
    """

    counts: tuple[int, ...]
    replay: Replay | None


def check_replayable(steps: Iterable[RecordedStep]) -> None:
    """Raise `RoundRefusedError` unless every step tells how to replay it."""
    if any(step.replay is None for step in steps):
        raise RoundRefusedError(
            "a recurrent layer did not tell its cache how to replay the step, so only a round that keeps everything "
            "can end; have the layer call record()"
        )


def replayed(arrays: Arrays, steps: Iterable[RecordedStep], keeps: Sequence[int]) -> Arrays:
    """Return a layer's arrays after the first positions of its steps.

    Args:
        arrays: `(B, ...)` each, as they were before the steps.
        steps: in their order; all tell how to replay.
        keeps: per row, how many positions stay.
    """
    remaining = list(keeps)
    for step in steps:
        kept = [min(count, left) for count, left in zip(step.counts, remaining, strict=True)]
        remaining = [left - count for left, count in zip(remaining, kept, strict=True)]
        if any(kept) and step.replay is not None:
            arrays = step.replay(arrays, mx.array(kept, mx.int32))
    return arrays
