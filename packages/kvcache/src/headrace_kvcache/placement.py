"""Where rows of one capacity class stand in one step: writes, contiguous runs and masks, shared by all layers."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_kvcache.attention import Mask
    from headrace_kvcache.columns import Columns
    from headrace_kvcache.forms import Fields


class Run:
    """Rows whose seats are neighbours, so that a plain slice of the buffer covers them.

    Attributes:
        rows: the run's half-open interval of the placement's rows.
        seats: the run's half-open interval of seats.
    """

    __slots__ = ("_placement", "_spans", "_starts", "rows", "seats")

    def __init__(self, placement: Placement, low: int, high: int) -> None:
        self.rows = (low, high)
        self.seats = (placement.seats[low], placement.seats[low] + high - low)
        self._starts = placement.starts[low:high]
        self._placement = placement
        self._spans: dict[int | None, tuple[range, Mask]] = {}

    def span(self, window: int | None) -> tuple[range, Mask]:
        """Return the columns that the run's queries can see and the mask over them; built once per window."""
        found = self._spans.get(window)
        if found is None:
            found = self._spans[window] = self._build(window)
        return found

    def _build(self, window: int | None) -> tuple[range, Mask]:
        now = self._placement
        if now.is_beside:
            return now.columns.beside(self._starts, now.num_tokens, window)
        last = min(max(self._starts) + now.num_tokens, now.last)
        return now.columns.span(self._starts, now.num_tokens, window, last=last)


class Placement:
    """The positions [start, start + T) of rows of one class, and where their seats lie.

    Args:
        seats: one per row, strictly ascending.
        starts: positions that each row holds before the step.
        counts: how many of the T positions are real in each row.
        num_tokens: T.
        columns: layout of positions over columns.
        room: capacity that padding must not pass; None if the buffers grow with it.

    Attributes:
        is_beside: whether the positions do not fit the ring: they are attended to beside it, then their tail is
            written.
        last: end of the highest position that is written.
    """

    __slots__ = (
        "_is_one_slice",
        "_is_row_wise",
        "_scatter",
        "columns",
        "counts",
        "is_beside",
        "last",
        "num_tokens",
        "runs",
        "seats",
        "starts",
    )

    def __init__(
        self,
        seats: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        num_tokens: int,
        *,
        columns: Columns,
        room: int | None,
    ) -> None:
        self.seats = tuple(seats)
        self.starts = tuple(starts)
        self.num_tokens = num_tokens
        self.columns = columns
        self.counts = tuple(counts)
        # A row of padding alone must find its ring as it was, one position more than a row that goes on.
        self.is_beside = not all(
            columns.fits_in_place(start, num_tokens + (not count)) for start, count in zip(starts, counts, strict=True)
        )
        self.last = max(starts) + num_tokens
        is_ring_whole = room is not None and room == columns.limit
        self._is_row_wise = self.is_beside or (room is not None and self.last > room and not is_ring_whole)
        if self._is_row_wise:
            self.last = max(start + count for start, count in zip(starts, counts, strict=True))
        self.runs = tuple(Run(self, low, high) for low, high in _contiguous(self.seats))
        self._is_one_slice = (
            not self._is_row_wise
            and len(self.runs) == 1
            and min(starts) == max(starts)
            and len(columns.segments(starts[0], starts[0] + num_tokens)) == 1
        )
        self._scatter: dict[int, tuple[mx.array, ...]] = {}

    @property
    def num_columns(self) -> int:
        """The columns that the buffers must have for this step."""
        limit = self.columns.limit
        return self.last if limit is None else min(self.last, limit)

    @property
    def written(self) -> tuple[int, ...]:
        """The end of the highest position written in each row, padding included."""
        if self._is_row_wise:
            return tuple(start + count for start, count in zip(self.starts, self.counts, strict=True))
        return tuple(start + self.num_tokens for start in self.starts)

    def store(self, buffers: Fields, added: Fields) -> None:
        """Write `added`, fields `(B, H, T, D)`, into `buffers (S, H, C, D)` in place, each row at its own positions."""
        if self._is_one_slice:
            (low, high), start = self.runs[0].seats, self.starts[0]
            [(first, last)] = self.columns.segments(start, start + self.num_tokens)
            for buffer, field in zip(buffers, added, strict=True):
                buffer[low:high, :, first:last] = field
        elif self._is_row_wise:
            self._store_rows(buffers, added)
        else:
            for buffer, field in zip(buffers, added, strict=True):
                buffer[self._scatter_ids(field.shape[1])] = field

    def _store_rows(self, buffers: Fields, added: Fields) -> None:
        for row, (seat, start, count) in enumerate(zip(self.seats, self.starts, self.counts, strict=True)):
            for low, high in self.columns.kept(start, start + count):
                taken = low - start
                for first, last in self.columns.segments(low, high):
                    for buffer, field in zip(buffers, added, strict=True):
                        buffer[seat, :, first:last] = field[row, :, taken : taken + last - first]
                    taken += last - first

    def _scatter_ids(self, num_heads: int) -> tuple[mx.array, ...]:
        """Return seats, heads and columns of what is written, `(B, H, T)` each, so that no layer broadcasts them."""
        found = self._scatter.get(num_heads)
        if found is None:
            positions = mx.array(self.starts, mx.int32)[:, None, None] + mx.arange(self.num_tokens, dtype=mx.int32)
            seats = mx.array(self.seats, mx.int32)[:, None, None]
            heads = mx.arange(num_heads, dtype=mx.int32)[:, None]
            found = self._scatter[num_heads] = tuple(mx.broadcast_arrays(seats, heads, self.columns.ids(positions)))
        return found


def _contiguous(seats: tuple[int, ...]) -> list[tuple[int, int]]:
    bounds = [0, *(row for row in range(1, len(seats)) if seats[row] != seats[row - 1] + 1), len(seats)]
    return list(itertools.pairwise(bounds))
