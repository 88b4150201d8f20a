"""Which prefill slices run in one forward, padded to the longest of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_scheduling.steps import PrefillSlice

# A forward of so few positions costs about the same however many of them are padding.
_CHEAP_POSITIONS = 128
# Otherwise at most a fifth of a forward's positions are padding.
_MAX_WASTE = 1.25


def pack_slices(slices: Sequence[PrefillSlice]) -> list[list[PrefillSlice]]:
    """Group slices by length so that little is computed for padding; each group is one forward."""
    packs: list[list[PrefillSlice]] = []
    num_tokens = 0
    for part in sorted(slices, key=_length, reverse=True):
        length = len(part.token_ids)
        if packs:
            padded = len(packs[-1][0].token_ids) * (len(packs[-1]) + 1)
            if padded <= max(_CHEAP_POSITIONS, _MAX_WASTE * (num_tokens + length)):
                packs[-1].append(part)
                num_tokens += length
                continue
        packs.append([part])
        num_tokens = length
    return packs


def _length(part: PrefillSlice) -> int:
    return len(part.token_ids)
