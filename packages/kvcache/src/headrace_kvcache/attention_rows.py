"""Slots for all layers of one attention kind: plain or ring, unquantized or quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_kvcache.buffers import LayerBuffers, buffer_columns
from headrace_kvcache.capacity import DEFAULT_CLASSES, CapacityClasses, power_of_two_at_least
from headrace_kvcache.contents import check_contents, check_rows, read_seat, write_seat
from headrace_kvcache.errors import EmptyCache, InvalidGeometry, InvalidLength
from headrace_kvcache.placement import Placement
from headrace_kvcache.slots import SlotTable, check_counts
from headrace_kvcache.views import Group, SlotView, Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from headrace_kvcache.columns import Columns
    from headrace_kvcache.forms import Fields, StoredForm
    from headrace_kvcache.slots import Room, Row


class AttentionRows:
    """What all batches of attention caches do; `RowBatch` says how to use them.

    Args:
        num_layers: number of cache-owning layers.
        max_rows: most rows at once.
        forms: what is stored: new rows in the first form, converted ones in the last.
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
        forms: Sequence[StoredForm],
        columns: Columns,
        classes: CapacityClasses = DEFAULT_CLASSES,
    ) -> None:
        if type(num_layers) is not int or num_layers < 1:
            raise InvalidGeometry(f"num_layers is {num_layers!r}; it must be an integer of at least 1")
        self._table = SlotTable(max_rows)
        self._layers = [LayerBuffers() for _ in range(num_layers)]
        self._forms = tuple(forms)
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

    # ---- rows --------------------------------------------------------------------------------------------------

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
        return self._table.join((0, self._class_for(num_tokens)))

    def leave(self, slot: int) -> None:
        """Free a row's slot; the last row to leave a capacity class releases its buffers.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        self._release_if_empty(self._table.leave(slot).room)

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
        return self._classes.capacity(self._table.row(slot).room[1])

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

    # ---- steps -------------------------------------------------------------------------------------------------

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
        for room in sorted({row.room for row in rows}):
            members = [index for index, row in enumerate(rows) if row.room == room]
            members.sort(key=lambda index: rows[index].seat)
            groups.append(self._group(room, members, rows, counts, num_tokens))
        step = Step([row.end for row in rows], num_tokens, groups)
        return [SlotView(layer, self._forms, step) for layer in self._layers]

    def _group(
        self, room: Room, members: list[int], rows: Sequence[Row], counts: Sequence[int], num_tokens: int
    ) -> Group:
        placement = Placement(
            [rows[index].seat for index in members],
            [rows[index].end for index in members],
            [counts[index] for index in members],
            num_tokens,
            columns=self._columns,
            room=self._classes.capacity(room[1]),
        )
        for index, written in zip(members, placement.written, strict=True):
            rows[index].written = max(rows[index].written, written)
            rows[index].granted = written
        return Group(room, members, placement, size=self._size(room, placement.num_columns), num_rows=len(rows))

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

    # ---- contents ----------------------------------------------------------------------------------------------

    def contents(self, slot: int) -> list[Fields]:
        """Return copies of what a row holds, per layer its fields `(1, H, n, ...)` in the order of positions.

        Computed at once, so that nothing pins the buffers. A ring gives its first `keep` positions and those that
        its window still needs. A row that waits for its conversion gives what it holds now.

        Raises:
            InvalidSlots: the slot holds no row.
            EmptyCache: the row holds nothing.
        """
        return list(self._read(self._table.row(slot)))

    def join_contents(self, end: int, contents: Sequence[Fields], *, num_tokens: int = 0) -> int:
        """Seat a row that already holds something, in the last form, copying its own bytes only; return its slot.

        Args:
            end: positions that the row holds.
            contents: per layer, fields as `contents` gives them.
            num_tokens: positions that the row is expected to reach.

        Raises:
            SlotsExhausted: every slot is taken.
            InvalidLength: `end` is not an integer of at least 1.
            InvalidGeometry: layers, positions, heads, sizes or dtypes that do not fit this batch.
        """
        check_contents(end, contents, num_layers=self.num_layers, columns=self._columns)
        last_form = len(self._forms) - 1
        for layer, fields in zip(self._layers, contents, strict=True):
            layer.check(last_form, fields)
        slot = self._table.join((last_form, self._class_for(max(end, num_tokens))))
        row = self._table.row(slot)
        self._fill(row.room, row.seat, end, contents)
        row.end = row.written = row.granted = end
        return slot

    def convert(self, slot: int) -> None:
        """Bring a row into the last form, one layer at a time; nothing if it is there already.

        The row keeps its slot and its class. All layers are converted or none.

        Raises:
            InvalidSlots: the slot holds no row.
            EmptyCache: the row holds nothing; an empty cache is never converted.
            InvalidGeometry: a head size that the form cannot store.
        """
        row = self._table.row(slot)
        if row.room[0] == len(self._forms) - 1:
            return
        self._move(row, (len(self._forms) - 1, row.room[1]), self._converted(row))

    def is_converted(self, slot: int) -> bool:
        """Return whether a row is in the form that it will keep.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        return self._table.row(slot).room[0] == len(self._forms) - 1

    # ---- facts -------------------------------------------------------------------------------------------------

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
        check_rows(self._table, self._layers, self._classes, self._columns)

    # ---- moving ------------------------------------------------------------------------------------------------

    def _class_for(self, num_tokens: int) -> int:
        limit = self._columns.limit
        return self._classes.index_for(num_tokens if limit is None else min(num_tokens, limit))

    def _size(self, room: Room, num_columns: int) -> tuple[int, int]:
        num_seats = min(power_of_two_at_least(self._table.num_seats(room)), self.max_rows)
        return num_seats, buffer_columns(num_columns, self._classes.capacity(room[1]))

    def _read(self, row: Row) -> Iterator[Fields]:
        if not row.end:
            raise EmptyCache("the row holds no position yet; there is nothing to copy")
        if not all(layer.of(row.room).fields for layer in self._layers):
            raise EmptyCache(f"the row ends at {row.end}, but a layer holds nothing; append to all layers first")
        for layer in self._layers:
            copied = read_seat(layer.of(row.room).fields, row.seat, row.end, self._columns)
            # At once: an unread view of a buffer would make its next write copy all of it.
            mx.eval(copied)
            yield copied

    def _converted(self, row: Row) -> Iterator[Fields]:
        form = self._forms[-1]
        for keys, values in self._read(row):
            form.check(keys, values)
            yield form.encode(keys, values)

    def _fill(self, room: Room, seat: int, end: int, contents: Iterable[Fields]) -> None:
        limit = self._columns.limit
        size = self._size(room, end if limit is None else min(end, limit))
        for layer, fields in zip(self._layers, contents, strict=True):
            buffers = layer.of(room)
            buffers.reserve(fields, size=size)
            write_seat(buffers.fields, seat, end, self._columns, fields)
            mx.eval(buffers.fields)
            layer.remember(room[0], fields)

    def _move_up(self, row: Row, class_index: int) -> None:
        form, held = row.room
        if class_index <= held:
            return
        is_stored = row.end and all(layer.of(row.room).fields for layer in self._layers)
        self._move(row, (form, class_index), self._read(row) if is_stored else None)

    def _move(self, row: Row, room: Room, contents: Iterable[Fields] | None) -> None:
        """Copy a row into another room, all layers or none: its old seat keeps its bytes until all are copied."""
        seat = self._table.take_seat(room)
        try:
            if contents is not None:
                self._fill(room, seat, row.end, contents)
        except BaseException:
            self._table.give_seat(room, seat)
            self._release_if_empty(room)
            raise
        old = row.room
        self._table.give_seat(old, row.seat)
        row.room, row.seat = room, seat
        self._release_if_empty(old)

    def _release_if_empty(self, room: Room) -> None:
        if not self._table.num_seats(room):
            for layer in self._layers:
                layer.release(room)
