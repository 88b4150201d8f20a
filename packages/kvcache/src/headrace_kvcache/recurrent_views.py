"""Recurrent layers of a batch as a model sees them during one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_kvcache.replay import Arrays, Recorded, Replay


class Picked:
    """Some seats of a buffer: read in one go, written in place.

    Args:
        seats: one per row, in any order.
        are_new: which rows have nothing yet and read as zeros.
    """

    __slots__ = ("_fresh", "_num_seats", "_run", "_seats")

    def __init__(self, seats: Sequence[int], are_new: Sequence[bool]) -> None:
        low = seats[0]
        is_run = list(seats) == list(range(low, low + len(seats)))
        self._num_seats = max(seats) + 1
        self._run = (low, low + len(seats)) if is_run else None
        self._seats = None if is_run else mx.array(list(seats), mx.int32)
        self._fresh = mx.array(list(are_new)) if any(are_new) else None

    def covers(self, num_seats: int) -> bool:
        """Return whether the rows are those of all seats, in their order, and none is new."""
        return self._run == (0, num_seats) and self._fresh is None

    def take(self, buffer: mx.array) -> mx.array:
        """Return the rows' arrays `(B, ...)`."""
        num_seats = buffer.shape[0]
        if self._run == (0, num_seats):
            rows = buffer
        else:
            # A new row may have a seat that the buffer does not reach yet.
            buffer = _with_seats(buffer, self._num_seats)
            rows = buffer[self._run[0] : self._run[1]] if self._run is not None else buffer[self._seats]
        if self._fresh is None:
            return rows
        return mx.where(self._fresh.reshape(-1, *[1] * (rows.ndim - 1)), mx.zeros_like(rows), rows)

    def take_all(self, buffers: Sequence[mx.array | None]) -> Arrays:
        """Return the rows' arrays of several buffers; None where there is none."""
        return [None if buffer is None else self.take(buffer) for buffer in buffers]

    def put(self, buffer: mx.array | None, rows: mx.array, num_seats: int) -> mx.array:
        """Write the rows' arrays into a buffer of at least `num_seats` seats and return it."""
        if self._run == (0, num_seats):
            return rows[:]
        if buffer is None:
            buffer = mx.zeros((num_seats, *rows.shape[1:]), rows.dtype)
        buffer = _with_seats(buffer, num_seats)
        if self._run is not None:
            buffer[self._run[0] : self._run[1]] = rows
        else:
            buffer[self._seats] = rows
        return buffer


def _with_seats(buffer: mx.array, num_seats: int) -> mx.array:
    if buffer.shape[0] >= num_seats:
        return buffer
    grown = mx.zeros((num_seats, *buffer.shape[1:]), buffer.dtype)
    grown[: buffer.shape[0]] = buffer
    return grown


class RecurrentStep:
    """The rows of one step; shared by the views of all layers."""

    __slots__ = ("_lengths", "_offset", "counts", "is_padded", "picked", "slots", "starts")

    def __init__(
        self, slots: tuple[int, ...], picked: Picked, counts: tuple[int, ...], *, starts: Sequence[int], is_padded: bool
    ) -> None:
        self.slots = slots
        self.picked = picked
        self.counts = counts
        self.starts = tuple(starts)
        self.is_padded = is_padded
        self._lengths: mx.array | None = None
        self._offset: mx.array | None = None

    @property
    def lengths(self) -> mx.array | None:
        """How many positions of each row are real, `(B,) int32`; None if all are."""
        if self._lengths is None and self.is_padded:
            self._lengths = mx.array(self.counts, mx.int32)
        return self._lengths

    @property
    def offset(self) -> mx.array:
        """Positions that each row summed up before the step, `(B,) int32`."""
        if self._offset is None:
            self._offset = mx.array(self.starts, mx.int32)
        return self._offset


class RecurrentView:
    """One recurrent layer of a batch during one step: `RecurrentCache` in every call that a layer makes.

    What the layer stores reaches the slots when the batch is advanced.

    Attributes:
        lengths: how many of the coming inputs of each row are real, `(B,) int32`; None for all.
        stored: what the layer stored, by index.
        recorded: how to sum up a part of the step again, if the layer told it.

    Args:
        step: the rows.
        buffers: the layer's slots.
        stored: `(B, ...)`, by index, what earlier steps of a round have stored.
    """

    __slots__ = ("_buffers", "_step", "lengths", "recorded", "stored")

    def __init__(
        self, step: RecurrentStep, buffers: Sequence[mx.array | None], stored: dict[int, mx.array] | None = None
    ) -> None:
        self._step = step
        self._buffers = buffers
        self.lengths = step.lengths
        self.stored: dict[int, mx.array] = {} if stored is None else stored
        self.recorded: Recorded | None = None

    @property
    def offset(self) -> mx.array:
        """Positions that each row summed up before this step, `(B,) int32`; one array shared by all layers."""
        return self._step.offset

    def __getitem__(self, index: int) -> mx.array | None:
        found = self.stored.get(index)
        if found is not None:
            return found
        buffer = self._buffers[index]
        return None if buffer is None else self._step.picked.take(buffer)

    def __setitem__(self, index: int, array: mx.array) -> None:
        self.stored[index] = array

    def make_mask(self, num_tokens: int) -> mx.array | None:
        """Return which of the coming inputs are real, `(B, num_tokens)`, or None for all."""
        return None if self.lengths is None else mx.arange(num_tokens) < self.lengths[:, None]

    def advance(self, num_tokens: int) -> None:
        """Tell that `num_tokens` inputs per row were summed up."""
        if self.lengths is not None:
            self.lengths = self.lengths - num_tokens

    def record(self, replay: Replay, *inputs: mx.array) -> None:
        """Tell how to sum up the first positions of this step again, see `RecurrentCache.record`."""
        self.recorded = replay, inputs
