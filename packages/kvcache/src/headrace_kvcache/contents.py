"""What one row holds, copied out of its seat or into one: its own bytes only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_kvcache.errors import IntegrityError, InvalidGeometry, InvalidLength

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_kvcache.buffers import LayerBuffers
    from headrace_kvcache.capacity import CapacityClasses
    from headrace_kvcache.columns import Columns
    from headrace_kvcache.forms import Fields
    from headrace_kvcache.slots import SlotTable


def read_seat(fields: Fields, seat: int, end: int, columns: Columns, *, first: int = 0, num_columns: int = 0) -> Fields:
    """Return copies of what a row that ends at `end` holds, in the order of positions.

    Args:
        fields: the buffers.
        seat: the row's seat.
        end: positions that the row holds.
        columns: where positions lie.
        first: the first position to copy, of those that are held.
        num_columns: columns that the copies have at least; what is held fills the first ones, zeros the rest.

    Returns:
        Fields `(1, H, n, ...)`, copied in one pass.
    """
    pieces = [piece for low, high in columns.held(end) for piece in columns.segments(max(low, first), high)]
    blank = num_columns - sum(high - low for low, high in pieces)
    copies: list[mx.array] = []
    for field in fields:
        parts = [field[seat : seat + 1, :, low:high] for low, high in pieces]
        if blank > 0:
            parts.append(mx.zeros((1, field.shape[1], blank, field.shape[3]), field.dtype))
        copies.append(mx.concatenate(parts, axis=2) if len(parts) > 1 else mx.contiguous(parts[0]))
    return tuple(copies)


def write_seat(fields: Fields, seat: int, end: int, columns: Columns, contents: Fields) -> None:
    """Write what a row that ends at `end` holds into a seat of buffers that have room for it, in place."""
    taken = 0
    for low, high in columns.held(end):
        for first, last in columns.segments(low, high):
            for buffer, field in zip(fields, contents, strict=True):
                buffer[seat : seat + 1, :, first:last] = field[:, :, taken : taken + last - first]
            taken += last - first


def check_contents(end: int, contents: Sequence[Fields], *, num_layers: int, columns: Columns) -> None:
    """Raise unless `contents` are what a row of `num_layers` layers that ends at `end` must hold."""
    if type(end) is not int or end < 1:
        raise InvalidLength(f"end is {end!r}; it must be an integer of at least 1")
    if len(contents) != num_layers:
        raise InvalidGeometry(f"{len(contents)} layers are given; this batch has {num_layers}")
    held = sum(max(0, high - low) for low, high in columns.held(end))
    for fields in contents:
        if any(field.shape[0] != 1 or field.shape[2] != held for field in fields):
            raise InvalidGeometry(
                f"fields of shapes {[field.shape for field in fields]} are no row that ends at {end}: they must be "
                f"(1, H, {held}, ...)"
            )


def check_rows(table: SlotTable, layers: Sequence[LayerBuffers], classes: CapacityClasses, columns: Columns) -> None:
    """Raise `IntegrityError` unless every row fits its class and every buffer its rows."""
    rows = [table.row(slot) for slot in table.joined]
    limit = columns.limit
    for row in rows:
        if not row.floor <= row.end <= min(row.written, row.granted):
            raise IntegrityError(f"the books of a row disagree: {row}")
        if limit is None and row.end > classes.capacity(row.room[1]):
            raise IntegrityError(f"a row in room {row.room} ends at {row.end}, beyond its capacity")
    for index, layer in enumerate(layers):
        for room, buffers in layer.rooms.items():
            ends = [row.end for row in rows if row.room == room]
            needed = max(ends, default=0) if limit is None else min(max(ends, default=0), limit)
            _check_buffers(f"layer {index}, room {room}", buffers.fields, bool(ends), needed)


def _check_buffers(name: str, fields: Fields, is_used: bool, needed: int) -> None:
    if fields and not is_used:
        raise IntegrityError(f"{name} holds {sum(field.nbytes for field in fields)} bytes for no row")
    shapes = {field.shape[:3] for field in fields}
    if len(shapes) > 1:
        raise IntegrityError(f"{name} has fields of different shapes {shapes}")
    for num_seats, _, num_columns in shapes:
        if num_columns < needed:
            raise IntegrityError(f"{name} has {num_seats} seats of {num_columns} columns; a row ends at {needed}")
