"""Slots for all layers of one attention kind: plain or ring, unquantized or quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_kvcache.buffers import LayerBuffers, buffer_columns
from headrace_kvcache.capacity import DEFAULT_CLASSES, CapacityClasses, power_of_two_at_least
from headrace_kvcache.contents import read_seat, write_seat
from headrace_kvcache.errors import EmptyCache, IntegrityError, InvalidGeometry, InvalidLength
from headrace_kvcache.placement import Placement
from headrace_kvcache.slots import SlotTable, check_counts
from headrace_kvcache.views import Group, SlotView, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_kvcache.columns import Columns
    from headrace_kvcache.forms import Fields, StoredForm
    from headrace_kvcache.slots import Row


class AttentionRows:
    """What all batches of attention caches do; `RowBatch` says how to use them.

    Args:
        num_layers: number of cache-owning layers.
        max_rows: most rows at once.
        form: what is stored.
        columns: where positions lie.
        classes: capacities of the slots.

    Raises:
        InvalidGeometry: a count that is not an integer of at least 1.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        max_rows: int,
        form: StoredForm,
        columns: Columns,
        classes: CapacityClasses = DEFAULT_CLASSES,
    ) -> None:
        if type(num_layers) is not int or num_layers < 1:
            raise InvalidGeometry(f"num_layers is {num_layers!r}; it must be an integer of at least 1")
        self._table = SlotTable(max_rows)
        self._layers = [LayerBuffers() for _ in range(num_layers)]
        self._form = form
        self._columns = columns
        self._classes = classes if columns.limit is None else classes.limited_to(columns.limit)

    @property
    def num_layers(self) -> int:
        """The cache-owning layers."""
        return len(self._layers)

    @property
    def max_rows(self) -> int:
        """The most rows that the batch holds at once."""
        return self._table.max_rows

    @property
    def joined(self) -> tuple[int, ...]:
        """The slots that hold a row, ascending."""
        return self._table.joined

    def join(self, *, num_tokens: int = 0) -> int:
        """Seat a new, empty row in the lowest free slot and return the slot.

        Args:
            num_tokens: positions that the row is expected to reach: it starts in the smallest class that holds them.

        Raises:
            SlotsExhausted: every slot is taken.
            InvalidLength: a negative number, or not an integer.
        """
        if type(num_tokens) is not int or num_tokens < 0:
            raise InvalidLength(f"num_tokens is {num_tokens!r}; it must be an integer of at least 0")
        return self._table.join(self._class_for(num_tokens))

    def leave(self, slot: int) -> None:
        """Free a row's slot; the last row to leave a capacity class releases its buffers.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        row = self._table.leave(slot)
        self._release_if_empty(row.class_index)

    def end(self, slot: int) -> int:
        """Return the number of positions that a row holds.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        return self._table.end(slot)

    def capacity(self, slot: int) -> int:
        """Return the positions that a row's slot is made for: what a budget charges.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        return self._classes.capacity(self._table.row(slot).class_index)

    def least_end(self, slot: int) -> int:
        """Return the lowest end that a row can be rolled back to.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        row = self._table.row(slot)
        return self._columns.least_end(row.end, row.written)

    def set_end(self, slot: int, num_tokens: int) -> None:
        """Roll a row back to its first `num_tokens` positions.

        Raises:
            InvalidSlots: the slot holds no row.
            InvalidLength: `num_tokens` is not from `least_end(slot)` to the row's end.
        """
        self._table.set_end(slot, num_tokens, least=self.least_end(slot))

    def view(self, slots: Sequence[int], num_tokens: int, *, lengths: Sequence[int] | None = None) -> list[SlotView]:
        """Return one cache per layer for a step that appends `num_tokens` positions to each of some rows.

        Rows of the step are in the order of `slots`. A row whose length is below `num_tokens` is padded on the
        right: its outputs beyond the length mean nothing and `advance` by the lengths forgets them. A row that
        outgrows its capacity class is moved up first, which waits for the steps in flight.

        Args:
            slots: slots of joined rows, strictly ascending.
            num_tokens: T, positions that the forward's input has per row.
            lengths: per row, how many of the T positions are real; None if all are.

        Raises:
            InvalidSlots: a slot holds no row, or the order is wrong.
            InvalidLength: `num_tokens` or a length is out of range.
        """
        rows = self._table.rows(slots)
        counts = check_counts(len(rows), num_tokens, lengths)
        for row, count in zip(rows, counts, strict=True):
            self._move_up(row, self._class_for(row.end + count))
        groups: list[Group] = []
        for class_index in sorted({row.class_index for row in rows}):
            members = [index for index, row in enumerate(rows) if row.class_index == class_index]
            members.sort(key=lambda index: rows[index].seat)
            groups.append(self._group(class_index, members, rows, counts, num_tokens))
        step = Step([row.end for row in rows], num_tokens, groups)
        return [SlotView(layer, self._form, step) for layer in self._layers]

    def _group(
        self, class_index: int, members: list[int], rows: Sequence[Row], counts: Sequence[int], num_tokens: int
    ) -> Group:
        capacity = self._classes.capacity(class_index)
        placement = Placement(
            [rows[index].seat for index in members],
            [rows[index].end for index in members],
            [counts[index] for index in members],
            num_tokens,
            columns=self._columns,
            room=capacity,
        )
        for index, written in zip(members, placement.written, strict=True):
            rows[index].written = max(rows[index].written, written)
            rows[index].granted = written
        return Group(
            class_index,
            members,
            placement,
            size=(self._num_seats(class_index), buffer_columns(placement.num_columns, capacity)),
            num_rows=len(rows),
        )

    def advance(self, slots: Sequence[int], num_tokens: int | Sequence[int]) -> None:
        """Keep what the last step appended: call it once the forward is built.

        Args:
            slots: the slots that the view was made for.
            num_tokens: positions to keep, for all rows or per row.

        Raises:
            InvalidSlots: a slot holds no row, or the order is wrong.
            InvalidLength: a count below 1, or beyond what the last view of the row made room for.
        """
        rows = self._table.rows(slots)
        if isinstance(num_tokens, int):
            counts = check_counts(len(rows), num_tokens, None)
        else:
            counts = check_counts(len(rows), max(1, *(row.granted for row in rows)), num_tokens)
        if any(row.end + count > row.granted for row, count in zip(rows, counts, strict=True)):
            raise InvalidLength(
                f"rows at {[row.end for row in rows]} cannot advance by {counts}: no view made room for that; "
                f"call view() first"
            )
        for row, count in zip(rows, counts, strict=True):
            row.end += count

    def contents(self, slot: int) -> list[Fields]:
        """Return copies of what a row holds, per layer its fields `(1, H, n, ...)` in the order of positions.

        Computed at once, so that nothing pins the buffers. A ring gives its first `keep` positions and those that
        its window still needs.

        Raises:
            InvalidSlots: the slot holds no row.
            EmptyCache: the row holds nothing.
        """
        row = self._table.row(slot)
        if not row.end:
            raise EmptyCache(f"slot {slot} holds no position yet; there is nothing to copy")
        layers = [layer.of(row.class_index).fields for layer in self._layers]
        if not all(layers):
            raise EmptyCache(f"slot {slot} ends at {row.end}, but a layer holds nothing; append to all layers first")
        copies = [read_seat(fields, row.seat, row.end, self._columns) for fields in layers]
        mx.eval(copies)
        return copies

    def join_contents(self, end: int, contents: Sequence[Fields], *, num_tokens: int = 0) -> int:
        """Seat a row that already holds something, copying its own bytes only, and return its slot.

        Args:
            end: positions that the row holds.
            contents: per layer, fields as `contents` gives them.
            num_tokens: positions that the row is expected to reach.

        Raises:
            SlotsExhausted: every slot is taken.
            InvalidLength: `end` is not an integer of at least 1.
            InvalidGeometry: layers, positions, heads, sizes or dtypes that do not fit this batch.
        """
        self._check_contents(end, contents)
        slot = self.join(num_tokens=max(end, num_tokens))
        row = self._table.row(slot)
        capacity = self._classes.capacity(row.class_index)
        size = self._num_seats(row.class_index), buffer_columns(min(end, capacity), capacity)
        for layer, fields in zip(self._layers, contents, strict=True):
            buffers = layer.of(row.class_index)
            buffers.reserve(fields, size=size)
            write_seat(buffers.fields, row.seat, end, self._columns, fields)
            layer.remember(fields)
        row.end = row.written = row.granted = end
        return slot

    def _check_contents(self, end: int, contents: Sequence[Fields]) -> None:
        if type(end) is not int or end < 1:
            raise InvalidLength(f"end is {end!r}; it must be an integer of at least 1")
        if len(contents) != len(self._layers):
            raise InvalidGeometry(f"{len(contents)} layers are given; this batch has {len(self._layers)}")
        held = sum(max(0, high - low) for low, high in self._columns.held(end))
        for layer, fields in zip(self._layers, contents, strict=True):
            layer.check(fields)
            if any(field.shape[0] != 1 or field.shape[2] != held for field in fields):
                raise InvalidGeometry(
                    f"fields of shapes {[field.shape for field in fields]} are no row that ends at {end}: they must "
                    f"be (1, H, {held}, ...)"
                )

    @property
    def arrays(self) -> list[mx.array]:
        """All buffers, for inspection and for `mx.eval`; do not keep the list.

        A step's outputs depend on its writes, so evaluating them is enough. Handing the buffers to `mx.async_eval`
        as well can pin them until that step ends, and a write dispatched before then copies its whole buffer.
        """
        return [array for layer in self._layers for array in layer.arrays]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers allocated now."""
        return sum(array.nbytes for array in self.arrays)

    def check_integrity(self) -> None:
        """Check the books against the buffers, without evaluating anything.

        Raises:
            IntegrityError: slots, seats and free lists disagree, a row ends beyond its class or its buffers, or a
                buffer outlived the last row of its class.
        """
        self._table.check_integrity()
        rows = [self._table.row(slot) for slot in self._table.joined]
        for row in rows:
            if self._columns.limit is None and row.end > self._classes.capacity(row.class_index):
                raise IntegrityError(f"a row of class {row.class_index} ends at {row.end}, beyond its capacity")
        for index, layer in enumerate(self._layers):
            for class_index, buffers in layer.classes.items():
                members = [row for row in rows if row.class_index == class_index]
                self._check_buffers(f"layer {index}, class {class_index}", buffers.fields, class_index, members)

    def _check_buffers(self, name: str, fields: tuple[mx.array, ...], class_index: int, members: list[Row]) -> None:
        if not fields:
            return
        if not members:
            raise IntegrityError(f"{name} holds {sum(field.nbytes for field in fields)} bytes for no row")
        shapes = {field.shape[:3] for field in fields}
        if len(shapes) != 1:
            raise IntegrityError(f"{name} has fields of different shapes {shapes}")
        [(num_seats, _, num_columns)] = shapes
        longest = max(row.end for row in members)
        needed = longest if self._columns.limit is None else min(longest, self._columns.limit)
        if num_columns < needed or num_columns > self._classes.capacity(class_index) or num_seats > self.max_rows:
            raise IntegrityError(f"{name} has {num_seats} seats of {num_columns} columns; a row ends at {longest}")

    def _class_for(self, num_tokens: int) -> int:
        limit = self._columns.limit
        return self._classes.index_for(num_tokens if limit is None else min(num_tokens, limit))

    def _num_seats(self, class_index: int) -> int:
        return min(power_of_two_at_least(self._table.num_seats(class_index)), self.max_rows)

    def _move_up(self, row: Row, class_index: int) -> None:
        """Copy a row into a larger class, all layers or none: its old seat keeps its bytes until all are copied."""
        if class_index <= row.class_index:
            return
        old = row.class_index
        seat = self._table.take_seat(class_index)
        size = self._num_seats(class_index), buffer_columns(row.end, self._classes.capacity(class_index))
        try:
            for layer in self._layers:
                layer.move((old, row.seat), (class_index, seat), row.end, size=size)
        except BaseException:
            self._table.give_seat(class_index, seat)
            self._release_if_empty(class_index)
            raise
        self._table.give_seat(old, row.seat)
        row.class_index, row.seat = class_index, seat
        self._release_if_empty(old)

    def _release_if_empty(self, class_index: int) -> None:
        if not self._table.num_seats(class_index):
            for layer in self._layers:
                layer.release(class_index)
