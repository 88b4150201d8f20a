"""How a step's budget of prefill tokens is dealt among the rows whose prompts are not computed yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# A slice this short costs about as much as a full one of a few times its length.
MIN_SLICE = 16


def deal_tokens(remaining: Sequence[int], budget: int) -> list[int]:
    """Deal a budget of tokens to rows; rows that get none wait for a later step.

    The first row is the oldest and gets at least half of the budget, so that no stream of short prompts can starve
    it. The others come shortest first: what can be answered soonest is (shortest remaining processing time). What
    they leave goes to the first row again.

    Args:
        remaining: per row, oldest first, how many tokens it could take now; at least 1.
        budget: tokens to deal, at least 1.

    Returns:
        Tokens per row, in the order given; their sum is at most `budget`, and at least one row gets some.
    """
    if not remaining:
        return []
    dealt = [0] * len(remaining)
    dealt[0] = min(remaining[0], -(-budget // 2) if len(remaining) > 1 else budget)
    left = budget - dealt[0]
    for index in sorted(range(1, len(remaining)), key=lambda index: (remaining[index], index)):
        share = min(remaining[index], left)
        if share == remaining[index] or share >= MIN_SLICE:
            dealt[index] = share
            left -= share
    dealt[0] += min(left, remaining[0] - dealt[0])
    return dealt
