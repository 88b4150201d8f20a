"""The books of a batch: which slots are taken and where each row ends. Free of arrays."""

import itertools
from collections.abc import Sequence

from headrace_kvcache.errors import InvalidGeometry, InvalidLength, InvalidSlots, SlotsExhausted


class SlotTable:
    """Slots of one batch. A row is a slot and the half-open interval [0, end) of its positions."""

    def __init__(self, max_rows: int) -> None:
        if type(max_rows) is not int or max_rows < 1:
            raise InvalidGeometry(f"max_rows is {max_rows!r}; it must be an integer of at least 1")
        self.max_rows = max_rows
        self._ends: list[int | None] = [None] * max_rows

    def join(self) -> int:
        """Take the lowest free slot, with no positions in it."""
        for slot, end in enumerate(self._ends):
            if end is None:
                self._ends[slot] = 0
                return slot
        raise SlotsExhausted(self.max_rows)

    def leave(self, slot: int) -> None:
        """Free a slot."""
        self.end(slot)
        self._ends[slot] = None

    def end(self, slot: int) -> int:
        """Return how many positions a row holds."""
        if type(slot) is not int or not 0 <= slot < self.max_rows:
            raise InvalidSlots(f"slot is {slot!r}; it must be an integer from 0 to {self.max_rows - 1}")
        end = self._ends[slot]
        if end is None:
            raise InvalidSlots(f"slot {slot} holds no row; join() first")
        return end

    def set_end(self, slot: int, num_tokens: int) -> None:
        """Lower a row's end: the positions from `num_tokens` on are forgotten."""
        end = self.end(slot)
        if type(num_tokens) is not int or not 0 <= num_tokens <= end:
            raise InvalidLength(f"the end of slot {slot} cannot be set to {num_tokens!r}; it must be from 0 to {end}")
        self._ends[slot] = num_tokens

    def ends(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Return the ends of joined slots.

        Raises:
            InvalidSlots: unless the slots are joined, at least one, and strictly ascending.
        """
        if not slots:
            raise InvalidSlots("no slots are given; a view needs at least one row")
        ends = tuple(self.end(slot) for slot in slots)
        if any(left >= right for left, right in itertools.pairwise(slots)):
            raise InvalidSlots(f"slots are {tuple(slots)!r}; they must be strictly ascending: sort the rows by slot")
        return ends

    def advance(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Move the end of each row forward by its count."""
        for slot, end, count in zip(slots, self.ends(slots), counts, strict=True):
            self._ends[slot] = end + count

    @property
    def joined(self) -> tuple[int, ...]:
        """The taken slots, ascending."""
        return tuple(slot for slot, end in enumerate(self._ends) if end is not None)


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
