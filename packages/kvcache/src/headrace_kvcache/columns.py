"""In which column of its seat a position lies, and which columns a query sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import mlx.core as mx

from headrace_kvcache.attention import causal_mask
from headrace_kvcache.errors import InvalidGeometry

if TYPE_CHECKING:
    from headrace_kvcache.attention import Mask


class Geometry(NamedTuple):
    """What a position sees: layouts of equal geometry hold the same rows.

    Attributes:
        window: positions that a query sees, None for all.
        keep: first positions that are never overwritten.
        chunk_size: positions of a chunk, None if there are no chunks.
    """

    window: int | None = None
    keep: int = 0
    chunk_size: int | None = None


class Columns(Protocol):
    """The layout of a row's positions over the columns of its seat."""

    @property
    def limit(self) -> int | None:
        """The most columns that a row ever needs; None without end."""
        ...

    @property
    def geometry(self) -> Geometry:
        """What a position sees."""
        ...

    def fits_in_place(self, start: int, num_tokens: int) -> bool:
        """Return whether writing the positions [start, start + num_tokens) spares all that their queries see."""
        ...

    def kept(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return which of the positions [first, last) a row still holds once they are all appended."""
        ...

    def held(self, end: int) -> list[tuple[int, int]]:
        """Return the positions that a row which ends at `end` must hold for what comes after."""
        ...

    def floor(self, end: int) -> int:
        """Return the lowest end that a row with nothing but `held(end)` can be rolled back to; 0 if that is all."""
        ...

    def least_end(self, end: int, written: int) -> int:
        """Return the lowest end that a row can be rolled back to."""
        ...

    def segments(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the pieces [low, high) of neighbouring columns of the positions [first, last), in their order."""
        ...

    def ids(self, positions: mx.array) -> mx.array:
        """Return the columns of positions."""
        ...

    def span(
        self, starts: tuple[int, ...], num_tokens: int, window: int | None, *, last: int, is_trimmed: bool = True
    ) -> tuple[range, Mask]:
        """Return the columns that queries at [start, start + T) of each row can see once appended, and their mask.

        `last` is the end of the highest position written. `is_trimmed` says whether columns that the window hides
        from all queries may be left out.
        """
        ...

    def beside(self, starts: tuple[int, ...], num_tokens: int, window: int | None) -> tuple[range, Mask]:
        """Return the columns to see before the append, and the mask over these and then the appended positions."""
        ...


class LinearColumns:
    """Position p lies in column p."""

    __slots__ = ()

    @property
    def limit(self) -> int | None:
        """None: a row may grow without end."""
        return None

    @property
    def geometry(self) -> Geometry:
        """Every position is seen."""
        return Geometry()

    def fits_in_place(self, start: int, num_tokens: int) -> bool:
        """Return True: nothing is overwritten."""
        del start, num_tokens
        return True

    def kept(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return them all: nothing is forgotten."""
        return [(first, last)]

    def held(self, end: int) -> list[tuple[int, int]]:
        """Return all positions."""
        return [(0, end)]

    def floor(self, end: int) -> int:
        """Return 0: nothing is left out."""
        del end
        return 0

    def least_end(self, end: int, written: int) -> int:
        """Return 0: every position can be forgotten."""
        del end, written
        return 0

    def segments(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the one piece."""
        return [(first, last)]

    def ids(self, positions: mx.array) -> mx.array:
        """Return the positions themselves."""
        return positions

    def span(
        self, starts: tuple[int, ...], num_tokens: int, window: int | None, *, last: int, is_trimmed: bool = True
    ) -> tuple[range, Mask]:
        """Return the columns from the first row's window to the longest row's end."""
        first = min(starts)
        if window is not None and window >= last:
            window = None
        columns = range(max(0, first + 1 - window) if window is not None and is_trimmed else 0, last)
        is_window_cut = window is None or (num_tokens == 1 and is_trimmed)
        if min(starts) == max(starts) == last - num_tokens and is_window_cut:
            # Equal starts: a single position sees every column left, several see MLX's own causal mask.
            return columns, None if num_tokens == 1 else "causal"
        return columns, causal_mask(_query_positions(starts, num_tokens), columns, window=window)

    def beside(self, starts: tuple[int, ...], num_tokens: int, window: int | None) -> tuple[range, Mask]:
        """Raise: everything is written in place."""
        raise InvalidGeometry(f"rows at {starts} take {num_tokens} positions in place (window {window!r})")


class RingColumns:
    """The first `keep` positions stay; the later ones go round in the other `window + slack - keep` columns.

    A query at p sees a position q <= p if q < keep or p - q < window - keep. The slack is what drafts may overwrite:
    up to slack + 1 positions are written in place, and all but the first can be taken back, wherever the ring stands.

    Args:
        window: positions that a query sees, kept ones and itself included.
        keep: first positions that are never overwritten.
        slack: columns beyond the window.

    Raises:
        InvalidGeometry: a count that is not an integer, a window below 1, `keep` not from 0 to window - 1, a
            negative slack.
    """

    __slots__ = ("_rolling", "_seen", "capacity", "keep", "slack", "window")

    def __init__(self, window: int, *, keep: int = 0, slack: int) -> None:
        if type(window) is not int or window < 1:
            raise InvalidGeometry(f"window is {window!r}; it must be an integer of at least 1")
        if type(keep) is not int or not 0 <= keep < window:
            raise InvalidGeometry(f"keep is {keep!r}; it must be an integer from 0 to {window - 1}")
        if type(slack) is not int or slack < 0:
            raise InvalidGeometry(f"slack is {slack!r}; it must be an integer of at least 0")
        self.window = window
        self.keep = keep
        self.slack = slack
        self.capacity = window + slack
        self._rolling = self.capacity - keep
        self._seen = window - keep

    @property
    def limit(self) -> int | None:
        """The columns of the whole ring."""
        return self.capacity

    @property
    def geometry(self) -> Geometry:
        """The window and the kept positions."""
        return Geometry(self.window, self.keep)

    def fits_in_place(self, start: int, num_tokens: int) -> bool:
        """Return whether the positions fit the slack or lie before the wrap."""
        return num_tokens <= self.slack + 1 or start + num_tokens <= self.capacity

    def kept(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the positions below `keep` and the last ones that the rolling columns hold."""
        return [(first, min(last, self.keep)), (max(first, self.keep, last - self._rolling), last)]

    def held(self, end: int) -> list[tuple[int, int]]:
        """Return the positions below `keep` and those that the window still needs."""
        return [(0, min(end, self.keep)), (max(min(end, self.keep), end - self._seen), end)]

    def floor(self, end: int) -> int:
        """Return 0 while the window still reaches the first position, else `end`."""
        return 0 if end <= self.window else end

    def least_end(self, end: int, written: int) -> int:
        """Return the lowest end whose last position still sees everything it saw."""
        return 0 if written <= self.capacity else min(end, written - self.slack)

    def segments(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return up to three pieces: kept columns, then up to the wrap, then from its start."""
        pieces: list[tuple[int, int]] = []
        while first < last:
            low = self._column(first)
            room = (self.keep if first < self.keep else self.capacity) - low
            count = min(last - first, room)
            pieces.append((low, low + count))
            first += count
        return pieces

    def _column(self, position: int) -> int:
        return position if position < self.keep else self.keep + (position - self.keep) % self._rolling

    def ids(self, positions: mx.array) -> mx.array:
        """Return the columns of positions."""
        return mx.where(
            positions < self.keep, positions, self.keep + mx.remainder(positions - self.keep, self._rolling)
        )

    def span(
        self, starts: tuple[int, ...], num_tokens: int, window: int | None, *, last: int, is_trimmed: bool = True
    ) -> tuple[range, Mask]:
        """Return the columns up to the longest end, or all of them once a row has wrapped."""
        del is_trimmed
        columns = range(min(last, self.capacity))
        is_seen_whole = last <= self.window and (window is None or window >= last)
        if is_seen_whole and min(starts) == max(starts) == last - num_tokens:
            return columns, None if num_tokens == 1 else "causal"
        held = mx.arange(columns.stop)
        if last > self.capacity:
            held = self._positions_held(starts, num_tokens)
        return columns, self._mask(_query_positions(starts, num_tokens), held, window)

    def beside(self, starts: tuple[int, ...], num_tokens: int, window: int | None) -> tuple[range, Mask]:
        """Return the columns that hold something before the append, and the mask over these and the new positions."""
        columns = range(min(max(starts), self.capacity))
        positions = _query_positions(starts, num_tokens)
        appended = positions.swapaxes(-1, -2)
        if not columns:
            if num_tokens <= self.window and (window is None or window >= num_tokens):
                return columns, "causal"
            return columns, self._mask(positions, appended, window)
        held = self._positions_held(starts, 0)[..., : columns.stop]
        return columns, self._mask(positions, mx.concatenate([held, appended], axis=-1), window)

    def _positions_held(self, starts: tuple[int, ...], num_tokens: int) -> mx.array:
        """Return the position in each column of rows that end at start + T, negative if none, `(B, 1, 1, C)`."""
        last = mx.array(starts, mx.int32)[:, None, None, None] + (num_tokens - 1)
        column_ids = mx.arange(self.capacity)
        rolling = last - mx.remainder(last - column_ids, self._rolling)
        kept = mx.where(column_ids <= last, column_ids, -1)
        return mx.where(column_ids < self.keep, kept, mx.where(rolling >= self.keep, rolling, -1))

    def _mask(self, positions: mx.array, held: mx.array, window: int | None) -> mx.array:
        seen = self._seen if window is None else min(window, self._seen)
        visible = held > positions - seen
        if self.keep:
            visible = visible | (held < self.keep)
        return (held >= 0) & (held <= positions) & visible


def _query_positions(starts: tuple[int, ...], num_tokens: int) -> mx.array:
    """Return the positions of the queries, `(B, 1, T, 1)`."""
    return mx.array(starts, mx.int32)[:, None, None, None] + mx.arange(num_tokens)[:, None]
