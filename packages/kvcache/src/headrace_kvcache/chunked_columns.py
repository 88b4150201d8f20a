"""A ring whose queries see their own chunk only: the layout of `ChunkedKVCache` over the columns of a seat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_kvcache.columns import Geometry, RingColumns

if TYPE_CHECKING:
    import mlx.core as mx


def chunk_start(end: int, chunk_size: int) -> int:
    """Return the first position of the chunk that the last one before `end` lies in; 0 for an empty row."""
    return max(0, end - 1) // chunk_size * chunk_size


class ChunkedColumns(RingColumns):
    """The positions go round in `chunk_size + slack` columns; a query sees its own chunk up to itself.

    A chunk is never longer than the ring's window, so that what a ring spares is enough for chunks too: up to
    slack + 1 positions are written in place, and all but the first can be taken back.

    Args:
        chunk_size: positions of a chunk.
        slack: columns beyond a chunk.

    Raises:
        InvalidGeometry: a count that is not an integer, a chunk size below 1, a negative slack.
    """

    __slots__ = ("chunk_size",)

    def __init__(self, chunk_size: int, *, slack: int) -> None:
        super().__init__(chunk_size, slack=slack)
        self.chunk_size = chunk_size

    @property
    def geometry(self) -> Geometry:
        """The chunk size."""
        return Geometry(chunk_size=self.chunk_size)

    def held(self, end: int) -> list[tuple[int, int]]:
        """Return the last position's chunk so far; what comes after sees no more than that."""
        return [(chunk_start(end, self.chunk_size), end)]

    def floor(self, end: int) -> int:
        """Return 0 within the first chunk, else the end of the last chunk's first position."""
        start = chunk_start(end, self.chunk_size)
        return start + 1 if start else 0

    def least_end(self, end: int, written: int) -> int:
        """Return the lowest end whose last position's chunk is held from its start."""
        first_held = written - self.capacity
        if first_held <= 0:
            return 0
        return min(end, -(-first_held // self.chunk_size) * self.chunk_size + 1)

    def _mask(self, positions: mx.array, held: mx.array, window: int | None) -> mx.array:
        mask = (held >= positions - positions % self.chunk_size) & (held <= positions)
        return mask if window is None else mask & (held > positions - window)
