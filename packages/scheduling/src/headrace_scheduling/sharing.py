"""Which running row computes the beginning of a prompt that another row is about to compute too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Below this a common prefix costs more to hand over than to compute again (rulings K-58a).
MIN_SHARED = 32


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading ids two prompts share.

    Compares whole slices and halves the range, so that long prompts cost a few comparisons of blocks in C.
    """
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def shared_length(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return how much of `ours` a row with the prompt `theirs` can provide: never all, or nothing would be computed."""
    return min(common_prefix_length(ours, theirs), len(ours) - 1)
