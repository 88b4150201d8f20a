"""Slots for all layers of one attention kind: plain, ring or chunked, unquantized or quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_kvcache.capacity import DEFAULT_CLASSES, CapacityClasses
from headrace_kvcache.contents import check_contents
from headrace_kvcache.errors import InvalidGeometry, InvalidLength, RoundRefusedError
from headrace_kvcache.placement import Placement
from headrace_kvcache.rooms import Rooms
from headrace_kvcache.rounds import RoundBooks, check_drafts
from headrace_kvcache.single_rows import make_single, read_single, single_columns
from headrace_kvcache.slots import check_counts, check_first
from headrace_kvcache.views import Group, SlotView, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from headrace_kvcache.columns import Columns
    from headrace_kvcache.forms import Fields, StoredForm
    from headrace_kvcache.single_rows import SingleCache
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
        self._rooms = Rooms(num_layers, max_rows, forms, columns, classes)
        self._table = self._rooms.table
        self._columns = columns
        self._round = RoundBooks()

    @property
    def num_layers(self) -> int:
        """The cache-owning layers."""
        return len(self._rooms.layers)

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
        return self._table.join((0, self._rooms.class_for(num_tokens)))

    def leave(self, slot: int) -> None:
        """Free a row's slot; the last row to leave a capacity class releases its buffers.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        self._rooms.release_if_empty(self._table.leave(slot).room)
        self._round.forget(slot)

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
        return self._rooms.classes.capacity(self._table.row(slot).room[1])

    def least_end(self, slot: int) -> int:
        """Return the lowest end that a row can be rolled back to.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        row = self._table.row(slot)
        return max(row.floor, self._columns.least_end(row.end, row.written))

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
            self._rooms.move_up(row, self._rooms.class_for(row.end + count))
        leasts = [self.least_end(slot) for slot in slots]
        groups: list[Group] = []
        for room in sorted({row.room for row in rows}):
            members = [index for index, row in enumerate(rows) if row.room == room]
            members.sort(key=lambda index: rows[index].seat)
            groups.append(self._group(room, members, rows, counts, num_tokens))
        step = Step([row.end for row in rows], num_tokens, groups, leasts=leasts)
        return [SlotView(layer, self._rooms.forms, step) for layer in self._rooms.layers]

    def _group(
        self, room: Room, members: list[int], rows: Sequence[Row], counts: Sequence[int], num_tokens: int
    ) -> Group:
        placement = Placement(
            [rows[index].seat for index in members],
            [rows[index].end for index in members],
            [counts[index] for index in members],
            num_tokens,
            columns=self._columns,
            room=self._rooms.classes.capacity(room[1]),
        )
        for index, written in zip(members, placement.written, strict=True):
            rows[index].written = max(rows[index].written, written)
            rows[index].granted = written
        return Group(room, members, placement, size=self._rooms.size(room, placement.num_columns), num_rows=len(rows))

    def advance(self, slots: Sequence[int], num_tokens: int | Sequence[int]) -> None:
        """Keep what the last step appended: call it once the forward is built.

        Args:
            slots: the slots that the view was made for.
            num_tokens: positions to keep, for all rows or per row.

        Raises:
            InvalidSlots: a slot holds no row, or the order is wrong.
            InvalidLength: a count below 1, or beyond what the last view of the row made room for.
        """
        counts = self.check_advance(slots, num_tokens)
        for row, count in zip(self._table.rows(slots), counts, strict=True):
            row.end += count

    def check_advance(self, slots: Sequence[int], num_tokens: int | Sequence[int]) -> tuple[int, ...]:
        """Return the count of each row, or raise as `advance` would; nothing changes."""
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
        return counts

    # ---- rounds ------------------------------------------------------------------------------------------------

    @property
    def is_in_round(self) -> bool:
        """Whether a round of speculation is open."""
        return self._round.is_open

    def spec_round_fits(self, drafts: int, *, slots: Sequence[int] | None = None) -> bool:
        """Return whether every row can keep any part of a step of drafts + 1 positions.

        Raises:
            InvalidCountError: `drafts` is not an integer of at least 0.
            InvalidSlots: a slot holds no row.
        """
        check_drafts(drafts)
        # One more than the step has: then even a round that keeps nothing can be rolled back.
        return all(
            self._columns.fits_in_place(end, drafts + 2)
            for end in self._table.ends(self.joined if slots is None else slots).values()
        )

    def spec_round_begin(self, *, slots: Sequence[int] | None = None) -> None:
        """Open a round of some rows, of all joined ones by default; `keep` later follows their order.

        Raises:
            RoundRefusedError: a round is open.
            InvalidSlots: a slot holds no row, or the order is wrong.
        """
        chosen = self.joined if slots is None else slots
        self._round.begin(self._table.starts(chosen))

    def spec_round_commit(self) -> None:
        """Keep everything that was appended since `spec_round_begin`.

        Raises:
            RoundRefusedError: no round is open.
        """
        self._round.close()

    def spec_round_rollback(self, keep: int | Sequence[int]) -> None:
        """Keep the first `keep` positions of each row that were appended since `spec_round_begin`.

        Args:
            keep: pending and accepted positions, for all rows or one count per row of the round.

        Raises:
            RoundRefusedError: no round is open, or a ring has overwritten what a row would need.
            InvalidCountError: a count that is not from 0 to what the row appended.
        """
        self.end_round(self.rollback_ends(keep))

    def rollback_ends(self, keep: int | Sequence[int]) -> dict[int, int]:
        """Return the ends that `spec_round_rollback(keep)` would leave, or raise as it would; nothing changes."""
        targets = self._round.targets(keep, self._table.ends(self._round.slots))
        self.check_rollback(targets)
        return targets

    def check_rollback(self, ends: dict[int, int]) -> None:
        """Raise `RoundRefusedError` unless the rows of the open round can go back to `ends`; nothing changes."""
        # Without a limit nothing is ever overwritten, and a floor lies below where the round began.
        for slot, end in ends.items() if self._columns.limit is not None else ():
            if end < self.least_end(slot):
                raise RoundRefusedError(
                    f"slot {slot} cannot go back to {end}: the ring has overwritten what it would need; ask "
                    f"spec_round_fits(drafts) before a round"
                )

    def end_round(self, ends: dict[int, int]) -> None:
        """End the open round with the ends that `rollback_ends` gave."""
        self._table.set_ends(ends)
        self._round.close()

    # ---- contents ----------------------------------------------------------------------------------------------

    def contents(self, slot: int) -> list[Fields]:
        """Return copies of what a row holds, per layer its fields `(1, H, n, ...)` in the order of positions.

        Computed at once, so that nothing pins the buffers. A ring gives its first `keep` positions and its window, a
        chunked row its last position's chunk. A row that waits for its conversion gives what it holds now.

        Raises:
            InvalidSlots: the slot holds no row.
            EmptyCache: the row holds nothing.
        """
        return list(self._rooms.read(self._table.row(slot)))

    def join_contents(
        self, end: int, contents: Sequence[Fields], *, num_tokens: int = 0, form_key: str | None = None
    ) -> int:
        """Seat a row that already holds something, copying its own bytes only; return its slot.

        Args:
            end: positions that the row holds.
            contents: per layer, fields as `contents` gives them.
            num_tokens: positions that the row is expected to reach.
            form_key: key of the form that the contents are stored in; None for the one that rows are converted to.

        Raises:
            SlotsExhausted: every slot is taken.
            InvalidLength: `end` is not an integer of at least 1.
            InvalidGeometry: layers, positions, heads, sizes or dtypes that do not fit this batch.
        """
        check_contents(end, contents, num_layers=self.num_layers, columns=self._columns)
        form = self._form_index(form_key)
        for layer, fields in zip(self._rooms.layers, contents, strict=True):
            layer.check(form, fields)
        slot = self._table.join((form, self._rooms.class_for(max(end, num_tokens))))
        row = self._table.row(slot)
        row.end = row.written = row.granted = end
        row.floor = self._columns.floor(end)
        self._rooms.fill(row, contents)
        return slot

    def extract(self, slot: int, *, first: int = 0) -> list[SingleCache]:
        """Return single-row caches of a row, one per layer, in buffers of their own; the row stays.

        Args:
            slot: the row's slot.
            first: positions to leave out at the front, for a store that has them: the caches then hold the others
                alone. Rings and chunks are copied as they are.

        Raises:
            InvalidSlots: the slot holds no row.
            InvalidLength: `first` is not an integer from 0 to the row's end.
            EmptyCache: a layer holds nothing although the row has positions.
        """
        row = self._table.row(slot)
        check_first(first, row.end)
        form = self._rooms.forms[row.room[0]]
        left_out = first if self._columns.limit is None else 0
        end = row.end - left_out
        capacity = single_columns(self._columns, end)
        layers = [()] * self.num_layers
        if end:
            layers = self._rooms.read(row, first=left_out, num_columns=capacity)
        return [make_single(form, self._columns, end, fields) for fields in layers]

    def join_caches(self, caches: Sequence[object], *, num_tokens: int = 0) -> int:
        """Seat a row that single-row caches hold, one per layer, copying its own bytes only; return its slot.

        The caches stay as they are and share nothing with the batch.

        Args:
            caches: of this batch's kind, all with the same number of positions.
            num_tokens: positions that the row is expected to reach.

        Raises:
            SlotsExhausted: every slot is taken.
            UnsupportedCache: a cache of another kind.
            InvalidGeometry: caches that do not fit this batch or each other.
        """
        rows = [read_single(cache) for cache in caches]
        kinds = {(row.end, row.form.key, row.geometry) for row in rows}
        if len(kinds) != 1:
            raise InvalidGeometry(f"caches of (positions, form, geometry) {sorted(map(str, kinds))} are no row")
        [(end, form_key, geometry)] = kinds
        if geometry != self._columns.geometry:
            raise InvalidGeometry(f"caches of {geometry} do not fit a batch of {self._columns.geometry}")
        if not end:
            self._form_index(form_key)
            return self.join(num_tokens=num_tokens)
        return self.join_contents(end, [row.fields for row in rows], num_tokens=num_tokens, form_key=form_key)

    def _form_index(self, key: str | None) -> int:
        keys = [form.key for form in self._rooms.forms]
        if key is None:
            return len(keys) - 1
        if key not in keys:
            raise InvalidGeometry(f"contents are stored as {key!r}; this batch stores {' or '.join(keys)}")
        return keys.index(key)

    def convert(self, slot: int) -> None:
        """Bring a row into the last form, one layer at a time; nothing if it is there already.

        The row keeps its slot and its class. All layers are converted or none.

        Raises:
            InvalidSlots: the slot holds no row.
            EmptyCache: the row holds nothing; an empty cache is never converted.
            InvalidGeometry: a head size that the form cannot store.
        """
        if not self.is_converted(slot):
            self._rooms.convert(self._table.row(slot), len(self._rooms.forms) - 1)

    def is_converted(self, slot: int) -> bool:
        """Return whether a row is in the form that it will keep.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        return self._table.row(slot).room[0] == len(self._rooms.forms) - 1

    # ---- facts -------------------------------------------------------------------------------------------------

    @property
    def arrays(self) -> list[mx.array]:
        """All buffers, for inspection and for `mx.eval`; do not keep the list.

        A step's outputs depend on its writes, so evaluating them is enough. Handing the buffers to `mx.async_eval`
        as well can pin them until that step ends, and a write dispatched before then copies its whole buffer.
        """
        return [array for layer in self._rooms.layers for array in layer.arrays]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers allocated now."""
        return sum(array.nbytes for array in self.arrays)

    def check_integrity(self) -> None:
        """Check the books against the buffers, without evaluating anything.

        Raises:
            IntegrityError: slots, seats and free lists disagree, a row ends beyond its class, its buffers or what was
                written, a buffer outlived the last row of its class, or a row that left is in the open round.
        """
        self._rooms.check()
        self._round.check_integrity(self.joined)
