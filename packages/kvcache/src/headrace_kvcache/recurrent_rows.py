"""Slots of recurrent layers: a fixed number of arrays per row, replaced as a whole when a step is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_kvcache.capacity import power_of_two_at_least
from headrace_kvcache.errors import (
    InvalidGeometry,
    InvalidLength,
    RoundRefusedError,
    UnsupportedCache,
)
from headrace_kvcache.recurrent import RecurrentCache
from headrace_kvcache.recurrent_buffers import RecurrentBuffers
from headrace_kvcache.recurrent_round import RecurrentRound, Viewed
from headrace_kvcache.recurrent_views import Picked, RecurrentStep, RecurrentView
from headrace_kvcache.replay import untold
from headrace_kvcache.rounds import check_drafts
from headrace_kvcache.slots import SlotTable, check_counts, check_first

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from headrace_kvcache.joined_replay import JoinedReplay
    from headrace_kvcache.replay import Arrays, Kept
    from headrace_kvcache.slots import Row

# One room: a recurrent row has one size only.
_ROOM = (0, 0)


class RecurrentRowBatch:
    """Slots of all recurrent layers of a model; `RowBatch` in every call.

    Per layer and array one buffer `(S, ...)`, S doubling up to `max_rows`, no time axis. A view reads a row's arrays
    as of the last kept step, zeros for a new row; what the layers store reaches the slots in `advance`, so that a step
    that fails or is not advanced changes nothing.

    A row cannot forget positions, except in a round: what its steps store reaches the slots when the round ends, and a
    layer that tells its view how to `replay` a step lets `spec_round_rollback` go back to where the round began and sum
    up again what is kept.

    Args:
        num_layers: number of recurrent layers.
        max_rows: most rows at once.
        size: arrays per layer: usually the tail of a convolution, then a float32 state.

    Raises:
        InvalidGeometry: a count that is not an integer of at least 1.
    """

    def __init__(self, num_layers: int, *, max_rows: int, size: int = 2) -> None:
        for name, count in (("num_layers", num_layers), ("size", size)):
            if type(count) is not int or count < 1:
                raise InvalidGeometry(f"{name} is {count!r}; it must be an integer of at least 1")
        self._table = SlotTable(max_rows)
        self._buffers = RecurrentBuffers(num_layers, size)
        self._viewed: Viewed | None = None
        self._round = RecurrentRound()
        self._can_replay: bool | None = None

    @property
    def num_layers(self) -> int:
        """The recurrent layers."""
        return len(self._buffers.layers)

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
        """Seat a new, empty row in the lowest free slot and return the slot; `num_tokens` costs nothing here.

        Raises:
            SlotsExhausted: every slot is taken.
            InvalidLength: a negative number, or not an integer.
        """
        if type(num_tokens) is not int or num_tokens < 0:
            raise InvalidLength(f"num_tokens is {num_tokens!r}; it must be an integer of at least 0")
        return self._table.join(_ROOM)

    def leave(self, slot: int) -> None:
        """Free a row's slot; the last row to leave releases all buffers.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        self._table.leave(slot)
        self._round.forget(slot)
        self._viewed = None
        if not self._table.joined:
            self._buffers.release()

    def end(self, slot: int) -> int:
        """Return the number of positions that a row sums up.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        return self._table.end(slot)

    def capacity(self, slot: int) -> int:
        """Return 0: a recurrent row has no positions to charge, its bytes are the same at any length.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        self._table.row(slot)
        return 0

    def least_end(self, slot: int) -> int:
        """Return the row's end: a sum cannot forget its last terms.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        return self._table.end(slot)

    def set_end(self, slot: int, num_tokens: int) -> None:
        """Accept the row's own end only.

        Raises:
            InvalidSlots: the slot holds no row.
            InvalidLength: any other number.
        """
        self._table.set_end(slot, num_tokens, least=self._table.end(slot))

    # ---- steps -------------------------------------------------------------------------------------------------

    def view(
        self, slots: Sequence[int], num_tokens: int, *, lengths: Sequence[int] | None = None
    ) -> list[RecurrentView]:
        """Return one cache per layer for a step that sums up `num_tokens` positions of each of some rows.

        Args:
            slots: slots of joined rows, strictly ascending.
            num_tokens: T, positions that the forward's input has per row.
            lengths: per row, how many of the T positions are real; None if all are.

        Raises:
            InvalidSlots: a slot holds no row, or the order is wrong.
            InvalidLength: `num_tokens` or a length is out of range.
            RoundRefusedError: a round is open in which only some of the rows take part.
        """
        rows = self._table.rows(slots)
        counts = check_counts(len(rows), num_tokens, lengths)
        in_round = self.is_round_of(slots)
        step = RecurrentStep(
            tuple(slots), _picked(rows), counts, starts=[row.end for row in rows], is_padded=bool(lengths)
        )
        views = [
            RecurrentView(step, buffers, self._round.stored(layer) if in_round else None)
            for layer, buffers in enumerate(self._buffers.layers)
        ]
        self._viewed = step, views
        return list(views)

    def is_round_of(self, slots: Sequence[int]) -> bool:
        """Return whether a step of these rows belongs to the open round.

        Raises:
            RoundRefusedError: only some of them take part.
        """
        return self._round.holds(slots)

    def advance(self, slots: Sequence[int], num_tokens: int | Sequence[int]) -> None:
        """Keep what the last step stored: call it once the forward is built.

        Args:
            slots: the slots that the view was made for.
            num_tokens: positions to keep: the view's T, or its lengths.

        Raises:
            InvalidSlots: a slot holds no row, or the last view was not of these slots.
            InvalidLength: other counts than the view's: a sum cannot leave out its last terms.
        """
        step, views = self._check_viewed(slots, num_tokens)
        if self.is_round_of(slots):
            self._round.keep((step, views))
        else:
            self._buffers.put(step.picked, [view.stored.items() for view in views], num_seats=self._num_seats())
        for row, count in zip(self._table.rows(slots), step.counts, strict=True):
            row.end += count
        self._can_replay = all(view.recorded is not None for view in views)
        self._viewed = None

    def _num_seats(self) -> int:
        return min(power_of_two_at_least(self._table.num_seats(_ROOM)), self.max_rows)

    def check_advance(self, slots: Sequence[int], num_tokens: int | Sequence[int]) -> tuple[int, ...]:
        """Return the count of each row, or raise as `advance` would; nothing changes."""
        return self._check_viewed(slots, num_tokens)[0].counts

    def _check_viewed(self, slots: Sequence[int], num_tokens: int | Sequence[int]) -> Viewed:
        rows = self._table.rows(slots)
        counts = (num_tokens,) * len(rows) if isinstance(num_tokens, int) else tuple(num_tokens)
        if self._viewed is None:
            raise InvalidLength(f"slots {tuple(slots)} cannot advance by {counts}: call view() first")
        step, views = self._viewed
        if step.slots != tuple(slots) or counts != step.counts:
            raise InvalidLength(
                f"slots {tuple(slots)} cannot advance by {counts}: the last view was of {step.slots} and {step.counts}"
            )
        return step, views

    # ---- rounds ------------------------------------------------------------------------------------------------

    @property
    def is_in_round(self) -> bool:
        """Whether a round of speculation is open."""
        return self._round.books.is_open

    def spec_round_fits(self, drafts: int, *, slots: Sequence[int] | None = None) -> bool:
        """Return whether drafts can be taken back: unless the last step's layers did not tell how to replay it.

        Raises:
            InvalidCountError: `drafts` is not an integer of at least 0.
            InvalidSlots: a slot holds no row.
        """
        check_drafts(drafts)
        for slot in slots or ():
            self._table.row(slot)
        return not drafts or self._can_replay is not False

    def spec_round_begin(self, *, slots: Sequence[int] | None = None) -> None:
        """Open a round of some rows, of all joined ones by default; nothing is copied.

        Until it ends, steps take all rows of the round or none.

        Raises:
            RoundRefusedError: a round is open.
            InvalidSlots: a slot holds no row, or the order is wrong.
        """
        chosen = self.joined if slots is None else slots
        self._round.begin(self._table.starts(chosen))

    def spec_round_commit(self) -> None:
        """Keep everything since `spec_round_begin`.

        Raises:
            RoundRefusedError: no round is open.
        """
        rows = [self._table.row(slot) for slot in self._round.books.started()]
        stored = [self._round.stored(layer).items() for layer in range(self.num_layers)]
        self._buffers.put(_picked(rows), stored, num_seats=self._num_seats(), left=self._round.left())
        self._round.close()

    def spec_round_rollback(self, keep: int | Sequence[int]) -> None:
        """Keep the first `keep` positions of each row that were summed up since `spec_round_begin`.

        Args:
            keep: pending and accepted positions, for all rows or one count per row of the round.

        Raises:
            RoundRefusedError: no round is open, or a layer did not tell how to replay.
            InvalidCountError: a count that is not from 0 to what the row summed up.
        """
        self.end_round(self.rollback_ends(keep))

    def rollback_ends(self, keep: int | Sequence[int]) -> dict[int, int]:
        """Return the ends that `spec_round_rollback(keep)` would leave, or raise as it would; nothing changes."""
        targets = self._round.books.targets(keep, self._table.ends(self._round.books.slots))
        self.check_rollback(targets)
        return targets

    def check_rollback(self, ends: dict[int, int]) -> None:
        """Raise `RoundRefusedError` unless the rows of the open round can go back to `ends`; nothing changes."""
        if not self._round.is_told and ends != self._table.ends(ends):
            raise untold()

    def end_round(self, ends: dict[int, int]) -> None:
        """End the open round with the ends that `rollback_ends` gave."""
        if ends == self._table.ends(ends):
            self.spec_round_commit()
            return
        steps = self._round.kept_steps(ends)
        if steps:
            self._replay(steps, [self._table.row(slot) for slot in ends])
        self._table.set_ends(ends)
        self._round.close()

    def _replay(self, steps: Sequence[tuple[list[JoinedReplay], Kept]], rows: Sequence[Row]) -> None:
        """Let the slots of the round's rows that have not left hold what they hold after what stays of its steps."""
        picked, left = self._round.picked, self._round.left()
        assert picked is not None
        replayed = self._buffers.replayed(picked, steps)
        seats = picked if left is None else _picked(rows)
        self._buffers.put_replayed(seats, replayed, num_seats=self._num_seats(), left=left)

    # ---- contents ----------------------------------------------------------------------------------------------

    def extract(self, slot: int, *, first: int = 0) -> list[RecurrentCache]:
        """Return single-row caches of a row, one per layer, with arrays of their own; the row stays.

        Args:
            slot: the row's slot.
            first: as in `RowBatch.extract`; a sum cannot leave out its first terms and is copied as it is.

        Raises:
            InvalidSlots: the slot holds no row.
            InvalidLength: `first` is not an integer from 0 to the row's end.
            RoundRefusedError: the row is in an open round.
        """
        row = self._table.row(slot)
        check_first(first, row.end)
        if slot in self._round.books.slots:
            raise RoundRefusedError(f"slot {slot} is in an open round; commit it or roll it back before a copy is made")
        caches = [RecurrentCache(self._buffers.size) for _ in range(self.num_layers)]
        for layer, cache in enumerate(caches):
            if row.end:
                cache.state = (self._buffers.copied(layer, _picked([row])), None, row.end)
            cache.can_replay = self._can_replay
        return caches

    def join_caches(self, caches: Sequence[object], *, num_tokens: int = 0) -> int:
        """Seat a row that single-row caches hold, one per layer, copying its own bytes only; return its slot.

        Raises:
            SlotsExhausted: every slot is taken.
            UnsupportedCache: a cache of another kind.
            InvalidGeometry: caches that do not fit this batch or each other.
        """
        states: list[tuple[Arrays, int]] = []
        told: list[bool | None] = []
        for cache in caches:
            if not isinstance(cache, RecurrentCache):
                raise UnsupportedCache(f"a {type(cache).__name__} cannot share slots of recurrent states")
            arrays, _, offset = cache.state
            states.append((arrays, offset))
            told.append(cache.can_replay)
        self._buffers.check_states(states)
        slot = self.join(num_tokens=num_tokens)
        row = self._table.row(slot)
        row.end = row.written = row.granted = states[0][1]
        stored = [enumerate(arrays) for arrays, _ in states]
        self._buffers.put(_picked([row]), stored, num_seats=self._num_seats())
        if self._can_replay is None and False in told:
            self._can_replay = False
        elif self._can_replay is None and None not in told:
            self._can_replay = True
        return slot

    def convert(self, slot: int) -> None:
        """Do nothing: a recurrent state is never quantized.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        self._table.row(slot)

    def is_converted(self, slot: int) -> bool:
        """Return True: a recurrent state is in the form that it keeps.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        self._table.row(slot)
        return True

    @property
    def arrays(self) -> list[mx.array]:
        """All buffers and what an open round has stored, for inspection and for `mx.eval`; do not keep the list."""
        return self._buffers.arrays + self._round.arrays

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers allocated now."""
        return sum(array.nbytes for array in self.arrays)

    def check_integrity(self) -> None:
        """Check slots, seats, free lists, buffers and the open round, without evaluating anything.

        Raises:
            IntegrityError: they disagree.
        """
        self._table.check_integrity()
        self._round.books.check_integrity(self.joined)
        settled = [self._table.row(slot) for slot in set(self.joined).difference(self._round.books.slots)]
        self._buffers.check_integrity(max((row.seat + 1 for row in settled if row.end), default=0))


def _picked(rows: Sequence[Row]) -> Picked:
    return Picked([row.seat for row in rows], [row.end == 0 for row in rows])
