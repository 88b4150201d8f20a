"""The books of a batch: which slots are taken, where each row ends and in which seat it lies. Free of arrays."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, TypeAlias

from attrs import define

from headrace_kvcache.errors import IntegrityError, InvalidGeometry, InvalidLength, InvalidSlots, SlotsExhausted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# A set of buffers that seats lie in: index of the stored form, index of the capacity class.
Room: TypeAlias = "tuple[int, int]"


class FreeList:
    """The free numbers below `size`; the lowest is taken first, so that neighbours stay neighbours."""

    __slots__ = ("_free", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._free = list(range(size))

    def take(self) -> int | None:
        """Take the lowest free number; None if there is none."""
        return heapq.heappop(self._free) if self._free else None

    def give(self, number: int) -> None:
        """Free a taken number."""
        heapq.heappush(self._free, number)

    @property
    def num_needed(self) -> int:
        """One more than the highest taken number; 0 if none is taken."""
        return self._size if not self._free else max(self.taken, default=-1) + 1

    @property
    def taken(self) -> set[int]:
        """The numbers that are not free."""
        return set(range(self._size)).difference(self._free)


@define
class Row:
    """One row's entry in the books.

    Attributes:
        end: the row holds the positions [0, end).
        written: the end of the highest position ever written, padding and rejected drafts included.
        granted: the end that the last view of the row made room for.
        floor: the end below which the row cannot be rolled back because it joined without what came before.
        room: stored form and capacity class that the row lies in.
        seat: index of its seat in the buffers of that room.
    """

    room: Room
    seat: int
    end: int = 0
    written: int = 0
    granted: int = 0
    floor: int = 0


class SlotTable:
    """Slots of one batch. A slot is the number a row is known by; its room and seat may change."""

    def __init__(self, max_rows: int) -> None:
        if type(max_rows) is not int or max_rows < 1:
            raise InvalidGeometry(f"max_rows is {max_rows!r}; it must be an integer of at least 1")
        self.max_rows = max_rows
        self._free = FreeList(max_rows)
        self._rows: dict[int, Row] = {}
        self._seats: dict[Room, FreeList] = {}

    def join(self, room: Room) -> int:
        """Take the lowest free slot and a seat in a room, with no positions in it."""
        slot = self._free.take()
        if slot is None:
            raise SlotsExhausted(self.max_rows)
        self._rows[slot] = Row(room, self.take_seat(room))
        return slot

    def leave(self, slot: int) -> Row:
        """Free a slot and its seat, and return what the books said about it."""
        row = self.row(slot)
        del self._rows[slot]
        self._free.give(slot)
        self._seats[row.room].give(row.seat)
        return row

    def take_seat(self, room: Room) -> int:
        """Take the lowest free seat of a room."""
        seats = self._seats.get(room)
        if seats is None:
            seats = self._seats[room] = FreeList(self.max_rows)
        seat = seats.take()
        if seat is None:
            raise SlotsExhausted(self.max_rows)
        return seat

    def give_seat(self, room: Room, seat: int) -> None:
        """Free a seat."""
        self._seats[room].give(seat)

    def num_seats(self, room: Room) -> int:
        """Return how many seats a room needs for its rows: one more than the highest taken."""
        seats = self._seats.get(room)
        return 0 if seats is None else seats.num_needed

    def row(self, slot: int) -> Row:
        """Return a joined row's entry."""
        row = self._rows.get(slot) if type(slot) is int else None
        if row is not None:
            return row
        if type(slot) is not int or not 0 <= slot < self.max_rows:
            raise InvalidSlots(f"slot is {slot!r}; it must be an integer from 0 to {self.max_rows - 1}")
        raise InvalidSlots(f"slot {slot} holds no row; join() first")

    def end(self, slot: int) -> int:
        """Return how many positions a row holds."""
        return self.row(slot).end

    def ends(self, slots: Iterable[int]) -> dict[int, int]:
        """Return how many positions rows hold, by slot."""
        return {slot: self.row(slot).end for slot in slots}

    def set_end(self, slot: int, num_tokens: int, *, least: int = 0) -> None:
        """Lower a row's end, at least to `least`: the positions from `num_tokens` on are forgotten."""
        row = self.row(slot)
        if type(num_tokens) is not int or not least <= num_tokens <= row.end:
            raise InvalidLength(
                f"the end of slot {slot} cannot be set to {num_tokens!r}; it must be from {least} to {row.end}"
            )
        row.end = row.granted = num_tokens

    def set_ends(self, ends: Mapping[int, int]) -> None:
        """Set the ends of rows, by slot, that are known to have reached them."""
        for slot, end in ends.items():
            row = self._rows[slot]
            row.end = row.granted = end

    def rows(self, slots: Sequence[int]) -> list[Row]:
        """Return the entries of joined slots.

        Raises:
            InvalidSlots: unless the slots are joined, at least one, and strictly ascending.
        """
        if not slots:
            raise InvalidSlots("no slots are given; a view needs at least one row")
        rows = [self.row(slot) for slot in slots]
        if list(slots) != sorted(set(slots)):
            raise InvalidSlots(f"slots are {tuple(slots)!r}; they must be strictly ascending: sort the rows by slot")
        return rows

    def starts(self, slots: Sequence[int]) -> dict[int, int]:
        """Return how many positions the rows of a round hold, by slot; raises as `rows`."""
        return {slot: row.end for slot, row in zip(slots, self.rows(slots), strict=True)}

    @property
    def joined(self) -> tuple[int, ...]:
        """The taken slots, ascending."""
        return tuple(sorted(self._rows))

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless slots, seats and free lists agree."""
        if set(self._rows) != self._free.taken:
            raise IntegrityError(f"slots {sorted(self._rows)} hold rows, the free list says {self._free.taken}")
        for room, seats in self._seats.items():
            used = [row.seat for row in self._rows.values() if row.room == room]
            if sorted(used) != sorted(seats.taken):
                raise IntegrityError(f"room {room} has rows in seats {sorted(used)}, but {seats.taken} taken")


def check_counts(num_rows: int, num_tokens: int, lengths: Sequence[int] | None) -> tuple[int, ...]:
    """Return how many of `num_tokens` positions are real in each row.

    Raises:
        InvalidLength: unless `num_tokens` is at least 1 and every length lies from 1 to it.
    """
    if type(num_tokens) is not int or num_tokens < 1:
        raise InvalidLength(f"num_tokens is {num_tokens!r}; it must be an integer of at least 1")
    if lengths is None:
        return (num_tokens,) * num_rows
    if len(lengths) != num_rows:
        raise InvalidLength(f"{len(lengths)} lengths are given for {num_rows} rows; there must be one per row")
    for length in lengths:
        if type(length) is not int or not 1 <= length <= num_tokens:
            raise InvalidLength(f"a row's length is {length!r}; it must be an integer from 1 to {num_tokens}")
    return tuple(lengths)


def check_first(first: int, end: int) -> None:
    """Raise `InvalidLength` unless `first` positions can be left out at the front of a row that ends at `end`."""
    if type(first) is not int or not 0 <= first <= end:
        raise InvalidLength(f"first is {first!r}; it must be an integer from 0 to the row's end, {end}")
