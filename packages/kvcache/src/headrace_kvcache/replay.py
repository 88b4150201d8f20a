"""Replaying the kept part of a round over recurrent layers, whose sums cannot forget their last terms (K-94)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx

from headrace_kvcache.errors import RoundRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Arrays: TypeAlias = "list[mx.array | None]"
# From a layer's arrays `(B, ...)` before a step and how many of its positions stay `(B,)` to the arrays after these.
Replay: TypeAlias = "Callable[[Arrays, mx.array], Arrays]"


def check_replayable(replays: Iterable[Replay | None]) -> None:
    """Raise `RoundRefusedError` unless every step tells how to replay it."""
    if any(replay is None for replay in replays):
        raise RoundRefusedError(
            "a recurrent layer did not tell its cache how to replay the step, so only a round that keeps everything "
            "can end; have the layer call record()"
        )


def kept_of_steps(steps: Iterable[tuple[int, ...]], keeps: Sequence[int]) -> list[mx.array | None]:
    """Share the positions that stay among steps, first steps first.

    Args:
        steps: per step, how many positions each row summed up.
        keeps: per row, how many positions stay.

    Returns:
        Per step how many of its positions stay, `(B,) int32`; None for a step of which nothing does.
    """
    remaining, shares = list(keeps), list[mx.array | None]()
    for counts in steps:
        kept = [min(count, left) for count, left in zip(counts, remaining, strict=True)]
        remaining = [left - count for left, count in zip(remaining, kept, strict=True)]
        shares.append(mx.array(kept, mx.int32) if any(kept) else None)
    return shares


def replayed(arrays: Arrays, replays: Iterable[Replay | None], kept: Iterable[mx.array | None]) -> Arrays:
    """Return a layer's arrays after the first positions of its steps.

    Args:
        arrays: `(B, ...)` each, as they were before the steps.
        replays: per step, how to replay it.
        kept: per step, what `kept_of_steps` gives.
    """
    for replay, share in zip(replays, kept, strict=True):
        if share is not None and replay is not None:
            arrays = replay(arrays, share)
    return arrays
