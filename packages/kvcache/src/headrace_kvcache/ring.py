"""Where the positions of a ring lie, and what its queries see. The arithmetic of `RotatingCache`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from headrace_kvcache.errors import InvalidGeometry

if TYPE_CHECKING:
    from headrace_kvcache.masks import Mask


class Ring(NamedTuple):
    """The layout of a ring's columns.

    The first `keep` positions stay in the first columns. While `head` equals `end` every position p lies in column
    p. Later the columns `[keep, head)` hold the newest positions and those from `head` on the ones before them.

    Attributes:
        max_size: positions that a query sees, kept ones and itself included.
        keep: first positions that are never overwritten.
        end: number of positions ever appended and not trimmed.
        head: one past the column of the newest position.
        num_columns: columns that hold something.
    """

    max_size: int
    keep: int
    end: int
    head: int
    num_columns: int

    @property
    def is_linear(self) -> bool:
        """Whether position p lies in column p."""
        return self.head == self.end

    @property
    def is_at_rest(self) -> bool:
        """Whether no column is held that the next position would not see or overwrite."""
        return self.num_columns <= self.max_size

    @property
    def num_whole(self) -> int:
        """How many of the last positions still have all that they see."""
        return self.end if self.is_linear else self.num_columns - self.max_size + 1

    def pieces(self, limit: int) -> list[tuple[int, int]]:
        """Return the columns [start, stop) in the order of time, of at most `limit` positions: kept and newest ones."""
        if self.is_linear:
            kept = min(self.keep, self.end)
            pieces = [(0, kept), (kept, self.end)]
        else:
            pieces = [(0, self.keep), (self.head, self.num_columns), (self.keep, self.head)]
        excess = sum(stop - start for start, stop in pieces) - limit
        for number, (start, stop) in enumerate(pieces[1:], 1):
            dropped = max(0, min(excess, stop - start))
            pieces[number] = (start + dropped, stop)
            excess -= dropped
        merged: list[tuple[int, int]] = []
        for start, stop in pieces:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            elif start < stop:
                merged.append((start, stop))
        return merged

    def after(self, num_tokens: int, *, drafted: int | None = None) -> Ring:
        """Return the layout after an append of `num_tokens` positions.

        Args:
            num_tokens: T.
            drafted: positions that an open round has appended before; nothing that the ring held when the round began
                is then overwritten. None outside of rounds.
        """
        end = self.end + num_tokens
        if self.is_linear and end <= self.max_size:
            return self._replace(end=end, head=end, num_columns=end)
        if drafted is not None:
            kept = min(self.num_columns, self.max_size + drafted)
            return self._replace(end=end, head=kept + num_tokens, num_columns=kept + num_tokens)
        if num_tokens == 1:
            head = self.head if self.num_columns == self.max_size else self.max_size
            column = self.keep if head == self.max_size else head
            return self._replace(end=end, head=column + 1, num_columns=self.max_size)
        kept = min(self.num_columns, self.max_size - 1)
        return self._replace(end=end, head=kept + num_tokens, num_columns=kept + num_tokens)

    def without_last(self, num_tokens: int) -> Ring:
        """Return the layout without the last positions, all of which an open round has appended."""
        end = self.end - num_tokens
        if self.is_linear:
            return self._replace(end=end, head=end, num_columns=end)
        # A round appends past the last column, so that its newest position is there.
        return self._replace(end=end, head=self.head - num_tokens, num_columns=self.num_columns - num_tokens)

    def at_rest(self) -> Ring:
        """Return the layout without what only the queries of the last append could see."""
        return self if self.is_at_rest else self._replace(head=self.max_size, num_columns=self.max_size)

    def mask(self, num_tokens: int, window: int | None, *, as_array: bool = False) -> Mask:
        """Return what the last `num_tokens` positions see of the columns.

        Args:
            num_tokens: T.
            window: positions that a query sees besides the kept ones, itself included, if below the ring's own.
            as_array: give an array also where `"causal"` says the same.

        Returns:
            None, `"causal"` or a boolean `(T, num_columns)`.
        """
        seen = self.max_size - self.keep
        if window is not None and window < min(self.end, self.max_size):
            seen = min(window, seen)
        elif num_tokens == 1 and self.is_at_rest:
            return None
        elif self.is_linear and self.end <= self.max_size and not as_array:
            return "causal"
        positions = mx.arange(self.end - num_tokens, self.end)[:, None]
        held = self._positions()
        visible = held > positions - seen
        if self.keep:
            visible = visible | (held < self.keep)
        return (held <= positions) & visible

    def _positions(self) -> mx.array:
        columns = mx.arange(self.num_columns)
        if self.is_linear:
            return columns
        newest = columns + (self.end - self.head)
        oldest = newest - (self.num_columns - self.keep)
        rolling = mx.where(columns < self.head, newest, oldest)
        return mx.where(columns < self.keep, columns, rolling) if self.keep else rolling


def check_ring(max_size: int, keep: int) -> None:
    """Raise `InvalidGeometry` unless the sizes describe a ring."""
    if type(max_size) is not int or max_size < 1:
        raise InvalidGeometry(f"max_size is {max_size!r}; it must be an integer of at least 1")
    if type(keep) is not int or not 0 <= keep < max_size:
        raise InvalidGeometry(f"keep is {keep!r}; it must be an integer from 0 to {max_size - 1}")
