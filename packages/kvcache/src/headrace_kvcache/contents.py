"""What one row holds, copied out of its seat or into one: its own bytes only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from headrace_kvcache.columns import Columns
    from headrace_kvcache.forms import Fields


def read_seat(fields: Fields, seat: int, end: int, columns: Columns) -> Fields:
    """Return copies of what a row that ends at `end` holds, fields `(1, H, n, ...)` in the order of positions."""
    pieces = [piece for low, high in columns.held(end) for piece in columns.segments(low, high)]
    return tuple(
        mx.concatenate([field[seat : seat + 1, :, low:high] for low, high in pieces], axis=2)
        if len(pieces) > 1
        else mx.contiguous(field[seat : seat + 1, :, pieces[0][0] : pieces[0][1]])
        for field in fields
    )


def write_seat(fields: Fields, seat: int, end: int, columns: Columns, contents: Fields) -> None:
    """Write what a row that ends at `end` holds into a seat of buffers that have room for it, in place."""
    taken = 0
    for low, high in columns.held(end):
        for first, last in columns.segments(low, high):
            for buffer, field in zip(fields, contents, strict=True):
                buffer[seat : seat + 1, :, first:last] = field[:, :, taken : taken + last - first]
            taken += last - first
