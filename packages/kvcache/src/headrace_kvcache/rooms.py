"""The rooms of a batch: buffers by stored form and capacity class, and rows that move between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_kvcache.buffers import LayerBuffers, buffer_columns
from headrace_kvcache.capacity import power_of_two_at_least
from headrace_kvcache.contents import check_rows, read_seat, write_seat
from headrace_kvcache.errors import EmptyCache
from headrace_kvcache.slots import SlotTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from headrace_kvcache.capacity import CapacityClasses
    from headrace_kvcache.columns import Columns
    from headrace_kvcache.forms import Fields, StoredForm
    from headrace_kvcache.slots import Room, Row


class Rooms:
    """Books and buffers of all layers of one kind.

    Attributes:
        table: which slots are taken, and where each row lies.
        layers: buffers, per layer.
        forms: stored forms, by the first index of a room.
        columns: where positions lie.
        classes: capacity classes, by the second index of a room.
    """

    __slots__ = ("classes", "columns", "forms", "layers", "table")

    def __init__(
        self, num_layers: int, max_rows: int, forms: Sequence[StoredForm], columns: Columns, classes: CapacityClasses
    ) -> None:
        self.table = SlotTable(max_rows)
        self.layers = [LayerBuffers() for _ in range(num_layers)]
        self.forms = tuple(forms)
        self.columns = columns
        self.classes = classes if columns.limit is None else classes.limited_to(columns.limit)

    def class_for(self, num_tokens: int) -> int:
        """Return the smallest class that holds `num_tokens` positions."""
        return self.classes.index_for(self.columns_for(num_tokens))

    def columns_for(self, num_tokens: int) -> int:
        """Return how many columns `num_tokens` positions need."""
        limit = self.columns.limit
        return num_tokens if limit is None else min(num_tokens, limit)

    def size(self, room: Room, num_columns: int) -> tuple[int, int]:
        """Return the seats and columns that a room's buffers must have for its rows and `num_columns`."""
        num_seats = min(power_of_two_at_least(self.table.num_seats(room)), self.table.max_rows)
        return num_seats, buffer_columns(num_columns, self.classes.capacity(room[1]))

    def read(self, row: Row, *, first: int = 0, num_columns: int = 0) -> Iterator[Fields]:
        """Yield copies of what a row holds, layer by layer, each computed before the next, see `read_seat`.

        Raises:
            EmptyCache: the row holds nothing, or a layer does not.
        """
        self._check_stored(row)
        for layer in self.layers:
            fields = layer.of(row.room).fields
            copied = read_seat(fields, row.seat, row.end, self.columns, first=first, num_columns=num_columns)
            mx.eval(copied)
            yield copied

    def _check_stored(self, row: Row) -> None:
        if not row.end:
            raise EmptyCache("the row holds no position yet; there is nothing to copy")
        if not self.is_stored(row):
            raise EmptyCache(f"the row ends at {row.end}, but a layer holds nothing; append to all layers first")

    def is_stored(self, row: Row) -> bool:
        """Return whether every layer has buffers for a row that holds something."""
        return row.end > 0 and all(layer.of(row.room).fields for layer in self.layers)

    def fill(self, row: Row, contents: Iterable[Fields]) -> None:
        """Write what a row holds, fields in the order of positions, into its seat."""
        size = self.size(row.room, self.columns_for(row.end))
        for layer, fields in zip(self.layers, contents, strict=True):
            buffers = layer.of(row.room)
            buffers.reserve(fields, size=size)
            write_seat(buffers.fields, row.seat, row.end, self.columns, fields)
            layer.remember(row.room[0], fields)

    def move_up(self, row: Row, class_index: int) -> None:
        """Bring a row into a larger class of its form; nothing if it lies in that class or above."""
        form, held = row.room
        if class_index > held:
            self._move(row, (form, class_index), self._columns_of(row) if self.is_stored(row) else ())

    def convert(self, row: Row, form: int) -> None:
        """Bring a row into another stored form, one layer at a time.

        Raises:
            EmptyCache: the row holds nothing; an empty cache is never converted.
        """
        self._check_stored(row)
        self._move(row, (form, row.room[1]), self._encoded(row, self.forms[form]))

    def _columns_of(self, row: Row) -> Iterator[Fields]:
        """Yield a row's columns as they lie, also those that only a rollback would need."""
        for layer in self.layers:
            fields = layer.of(row.room).fields
            count = min(self.columns_for(row.written), fields[0].shape[2])
            copied = tuple(mx.contiguous(field[row.seat : row.seat + 1, :, :count]) for field in fields)
            # At once: an unread view of a buffer would make its next write copy all of it.
            mx.eval(copied)
            yield copied

    def _encoded(self, row: Row, form: StoredForm) -> Iterator[Fields]:
        for keys, values in self._columns_of(row):
            form.check(keys, values)
            yield form.encode(keys, values)

    def _move(self, row: Row, room: Room, columns: Iterable[Fields]) -> None:
        """Copy a row into another room, all layers or none: its old seat keeps its bytes until all are copied."""
        seat = self.table.take_seat(room)
        try:
            for layer, fields in zip(self.layers, columns, strict=False):
                count = fields[0].shape[2]
                buffers = layer.of(room)
                buffers.reserve(fields, size=self.size(room, count))
                for buffer, field in zip(buffers.fields, fields, strict=True):
                    buffer[seat : seat + 1, :, :count] = field
                mx.eval(buffers.fields)
                layer.remember(room[0], fields)
        except BaseException:
            self.table.give_seat(room, seat)
            self.release_if_empty(room)
            raise
        old = row.room
        self.table.give_seat(old, row.seat)
        row.room, row.seat = room, seat
        self.release_if_empty(old)

    def release_if_empty(self, room: Room) -> None:
        """Drop a room's buffers once no row lies in it."""
        if not self.table.num_seats(room):
            for layer in self.layers:
                layer.release(room)

    def check(self) -> None:
        """Raise `IntegrityError` unless books and buffers agree."""
        self.table.check_integrity()
        check_rows(self.table, self.layers, self.classes, self.columns)
