"""Rows of a batch in the first seats of its buffers, without gaps: leaving, and taking over another batch's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_kvcache.buffers import SlotBuffers


def close_up(buffers: SlotBuffers, chosen: Sequence[int], *, num_columns: int, num_used: int) -> None:
    """Bring the chosen seats to the front, in the given order.

    Few rows into a gap are copied in place; otherwise the chosen rows are copied into buffers of their own, which
    also gives memory back once half of the seats are free.

    Args:
        buffers: of one layer.
        chosen: seats that stay.
        num_columns: columns that buffers of their own get.
        num_used: columns that hold something.
    """
    if not chosen:
        buffers.release()
    if not buffers.fields:
        return
    moved = [seat for seat, index in enumerate(chosen) if seat != index]
    is_roomy = 2 * len(chosen) <= buffers.fields[0].shape[0]
    if is_roomy or 2 * len(moved) > len(chosen) or list(chosen) != sorted(chosen):
        rows = mx.array(list(chosen), mx.int32)
        buffers.fields = tuple(field[:, :, :num_columns][rows] for field in buffers.fields)
    elif moved:
        _move(buffers, [chosen[seat] for seat in moved], moved, num_used)


def _move(buffers: SlotBuffers, sources: list[int], targets: list[int], num_used: int) -> None:
    copies = [field[:, :, :num_used][mx.array(sources, mx.int32)] for field in buffers.fields]
    # First: an unread view of a buffer would make the write copy all of it.
    mx.eval(copies)
    for field, copied in zip(buffers.fields, copies, strict=True):
        field[mx.array(targets, mx.int32), :, :num_used] = copied


def take_over(
    buffers: SlotBuffers, other: SlotBuffers, *, first: int, num_rows: int, size: tuple[int, int], num_used: int
) -> None:
    """Copy the first seats of other buffers behind one's own.

    Args:
        buffers: of one layer.
        other: of the same layer in another batch.
        first: seat of the first row taken over.
        num_rows: rows to take over.
        size: seats and columns that `buffers` must have.
        num_used: columns of `other` that hold something.
    """
    buffers.reserve(other.fields, size=size)
    for field, added in zip(buffers.fields, other.fields, strict=True):
        field[first : first + num_rows, :, :num_used] = added[:num_rows, :, :num_used]
