"""Where the rows of one step stand in the slots: positions, contiguous runs and masks, shared by all layers."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_kvcache.attention import Mask, causal_mask

if TYPE_CHECKING:
    from collections.abc import Sequence


class Run:
    """Rows of a step whose slots are neighbours, so that a plain slice of the buffer covers them.

    Attributes:
        rows: the run's half-open interval of step rows.
        slots: the run's half-open interval of slots.
    """

    __slots__ = ("_masks", "_num_tokens", "_starts", "rows", "slots")

    def __init__(self, first_row: int, first_slot: int, starts: tuple[int, ...], num_tokens: int) -> None:
        self.rows = (first_row, first_row + len(starts))
        self.slots = (first_slot, first_slot + len(starts))
        self._starts = starts
        self._num_tokens = num_tokens
        self._masks: dict[int | None, tuple[range, Mask]] = {}

    def span(self, window: int | None) -> tuple[range, Mask]:
        """Return the columns that the run's queries can see and the mask over them; built once per window."""
        found = self._masks.get(window)
        if found is None:
            found = self._masks[window] = self._build(window)
        return found

    def _build(self, window: int | None) -> tuple[range, Mask]:
        first, last = min(self._starts), max(self._starts) + self._num_tokens
        if window is not None and window >= last:
            window = None
        columns = range(0 if window is None else max(0, first + 1 - window), last)
        if first + self._num_tokens == last and (self._num_tokens == 1 or window is None):
            # Equal starts: a single position sees every column left, several see MLX's own causal mask.
            return columns, None if self._num_tokens == 1 else "causal"
        starts = mx.array(self._starts, mx.int32)[:, None, None, None]
        positions = starts + mx.arange(self._num_tokens)[:, None]
        return columns, causal_mask(positions, columns, window=window)


class Placement:
    """The positions `[start, start + T)` of each row of one step, and where its slot lies."""

    __slots__ = (
        "_head_ids",
        "_is_one_slice",
        "_offset",
        "_position_ids",
        "_slot_ids",
        "num_tokens",
        "runs",
        "slots",
        "starts",
    )

    def __init__(self, slots: Sequence[int], starts: tuple[int, ...], num_tokens: int) -> None:
        self.slots = tuple(slots)
        self.starts = starts
        self.num_tokens = num_tokens
        self.runs = _contiguous_runs(self.slots, starts, num_tokens)
        self._is_one_slice = len(self.runs) == 1 and min(starts) == max(starts)
        self._offset: mx.array | None = None
        self._slot_ids: mx.array | None = None
        self._position_ids: mx.array | None = None
        self._head_ids: dict[int, mx.array] = {}

    @property
    def offset(self) -> mx.array:
        """Each row's first position, `(B,) int32`: one array for every layer."""
        if self._offset is None:
            self._offset = mx.array(self.starts, mx.int32)
        return self._offset

    @property
    def max_end(self) -> int:
        """The end of the longest row after the step, padding included."""
        return max(self.starts) + self.num_tokens

    def store(self, buffer: mx.array, added: mx.array) -> None:
        """Write `added (B, H, T, D)` into `buffer (S, H, C, D)` in place, each row at its own positions."""
        if self._is_one_slice:
            (low, high), start = self.runs[0].slots, self.starts[0]
            buffer[low:high, :, start : start + self.num_tokens] = added
        else:
            buffer[self._scatter_ids(added.shape[1])] = added

    def _scatter_ids(self, num_heads: int) -> tuple[mx.array, mx.array, mx.array]:
        if self._slot_ids is None or self._position_ids is None:
            self._slot_ids = mx.array(self.slots, mx.int32)[:, None, None]
            self._position_ids = self.offset[:, None, None] + mx.arange(self.num_tokens, dtype=mx.int32)
        head_ids = self._head_ids.get(num_heads)
        if head_ids is None:
            head_ids = self._head_ids[num_heads] = mx.arange(num_heads, dtype=mx.int32)[:, None]
        return self._slot_ids, head_ids, self._position_ids


def _contiguous_runs(slots: tuple[int, ...], starts: tuple[int, ...], num_tokens: int) -> tuple[Run, ...]:
    bounds = [0, *(row for row in range(1, len(slots)) if slots[row] != slots[row - 1] + 1), len(slots)]
    return tuple(Run(low, slots[low], starts[low:high], num_tokens) for low, high in itertools.pairwise(bounds))
