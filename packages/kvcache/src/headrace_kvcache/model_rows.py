"""Slots for a whole model: its layers grouped by kind of cache, behind the calls of one `RowBatch`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from headrace_kvcache.capacity import DEFAULT_CLASSES, CapacityClasses
from headrace_kvcache.composite import CacheList
from headrace_kvcache.errors import IntegrityError, InvalidGeometry, InvalidLength, UnsupportedCache
from headrace_kvcache.recurrent_rows import RecurrentRowBatch
from headrace_kvcache.ring_rows import DEFAULT_SLACK
from headrace_kvcache.row_kinds import row_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import mlx.core as mx

    from headrace_kvcache.recurrent_views import RecurrentView
    from headrace_kvcache.row_kinds import RowKind, Rows
    from headrace_kvcache.views import SlotView

LayerView: TypeAlias = "SlotView | RecurrentView | ListView"
# Where a layer's cache lies: batch and layer in it, or the places of a list's caches.
Place: TypeAlias = "tuple[int, int] | list[Place]"


class ListView:
    """The caches of one layer that owns several, by index, during one step."""

    __slots__ = ("caches",)

    def __init__(self, caches: Sequence[LayerView]) -> None:
        self.caches = tuple(caches)

    def __getitem__(self, index: int) -> LayerView:
        return self.caches[index]

    @property
    def offset(self) -> mx.array:
        """Positions that each row held before this step, `(B,) int32`."""
        return self.caches[0].offset


class ModelRowBatch:
    """Slots of all layers of a model whose caches are of several kinds; `RowBatch` in every call.

    A row has the same slot in every kind. What cannot be done in one kind is done in none.

    Args:
        places: per layer, where its cache lies.
        batches: the slots of each kind.
    """

    def __init__(self, places: Sequence[Place], batches: Sequence[Rows]) -> None:
        self._places = list(places)
        self._batches = list(batches)
        self._recurrent = [batch for batch in batches if isinstance(batch, RecurrentRowBatch)]

    @property
    def num_layers(self) -> int:
        """The cache-owning layers."""
        return len(self._places)

    @property
    def max_rows(self) -> int:
        """The most rows that the batch holds at once."""
        return self._batches[0].max_rows

    @property
    def joined(self) -> tuple[int, ...]:
        """The slots that hold a row, ascending."""
        return self._batches[0].joined

    # ---- rows --------------------------------------------------------------------------------------------------

    def join(self, *, num_tokens: int = 0) -> int:
        """Seat a new, empty row in the lowest free slot and return the slot, see `RowBatch.join`."""
        return self._join([partial(batch.join, num_tokens=num_tokens) for batch in self._batches])

    def join_caches(self, caches: Sequence[object], *, num_tokens: int = 0) -> int:
        """Seat a row that single-row caches hold, one per layer; return its slot.

        Args:
            caches: of the kinds that the batch was made for, in the order of the layers.
            num_tokens: positions that the row is expected to reach.

        Raises:
            SlotsExhausted: every slot is taken.
            UnsupportedCache: a cache of another kind.
            InvalidGeometry: caches that do not fit this batch or each other.
        """
        if len(caches) != len(self._places):
            raise InvalidGeometry(f"{len(caches)} caches are given; this batch has {len(self._places)} layers")
        parts: list[list[object]] = [[None] * batch.num_layers for batch in self._batches]
        for place, cache in zip(self._places, caches, strict=True):
            _spread(place, cache, parts)
        joins = [
            partial(batch.join_caches, part, num_tokens=num_tokens)
            for batch, part in zip(self._batches, parts, strict=True)
        ]
        slot = self._join(joins)
        if len({batch.end(slot) for batch in self._batches}) != 1:
            ends = [batch.end(slot) for batch in self._batches]
            self.leave(slot)
            raise InvalidGeometry(f"caches of different kinds hold {ends} positions; they must agree")
        return slot

    def _join(self, joins: Sequence[Callable[[], int]]) -> int:
        slots: list[int] = []
        try:
            slots.extend(join() for join in joins)
        except BaseException:
            for batch, slot in zip(self._batches, slots, strict=False):
                batch.leave(slot)
            raise
        return slots[0]

    def leave(self, slot: int) -> None:
        """Free a row's slot in every kind, see `RowBatch.leave`."""
        for batch in self._batches:
            batch.leave(slot)

    def end(self, slot: int) -> int:
        """Return the number of positions that a row holds.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        return self._batches[0].end(slot)

    def capacities(self, slot: int) -> tuple[int, ...]:
        """Return the positions that a row's slot is made for in each kind: what a budget charges.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        return tuple(batch.capacity(slot) for batch in self._batches)

    def least_end(self, slot: int) -> int:
        """Return the lowest end that a row can be rolled back to in every kind.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        return max(batch.least_end(slot) for batch in self._batches)

    def set_end(self, slot: int, num_tokens: int) -> None:
        """Roll a row back to its first `num_tokens` positions, in every kind or in none.

        Raises:
            InvalidSlots: the slot holds no row.
            InvalidLength: `num_tokens` is not from `least_end(slot)` to the row's end.
        """
        least, end = self.least_end(slot), self.end(slot)
        if type(num_tokens) is not int or not least <= num_tokens <= end:
            raise InvalidLength(
                f"the end of slot {slot} cannot be set to {num_tokens!r}; it must be from {least} to {end}"
            )
        for batch in self._batches:
            batch.set_end(slot, num_tokens)

    # ---- steps -------------------------------------------------------------------------------------------------

    def view(self, slots: Sequence[int], num_tokens: int, *, lengths: Sequence[int] | None = None) -> list[LayerView]:
        """Return one cache per layer, in the order of the layers, see `RowBatch.view`.

        Raises:
            RoundRefusedError: a round is open in which only some of the rows take part, and there are recurrent layers.
        """
        for batch in self._recurrent:
            batch.is_round_of(slots)
        views = [batch.view(slots, num_tokens, lengths=lengths) for batch in self._batches]
        return [_pick(place, views) for place in self._places]

    def advance(self, slots: Sequence[int], num_tokens: int | Sequence[int]) -> None:
        """Keep what the last step appended, see `RowBatch.advance`."""
        for batch in self._batches:
            batch.check_advance(slots, num_tokens)
        for batch in self._batches:
            batch.advance(slots, num_tokens)

    # ---- rounds ------------------------------------------------------------------------------------------------

    @property
    def is_in_round(self) -> bool:
        """Whether a round of speculation is open."""
        return self._batches[0].is_in_round

    def spec_round_fits(self, drafts: int, *, slots: Sequence[int] | None = None) -> bool:
        """Return whether every row can keep any part of a step of drafts + 1 positions, in every kind."""
        return all(batch.spec_round_fits(drafts, slots=slots) for batch in self._batches)

    def spec_round_begin(self, *, slots: Sequence[int] | None = None) -> None:
        """Open a round of some rows, of all joined ones by default, see `RowBatch.spec_round_begin`."""
        for batch in self._batches:
            batch.spec_round_begin(slots=slots)

    def spec_round_commit(self) -> None:
        """Keep everything that was appended since `spec_round_begin`."""
        for batch in self._batches:
            batch.spec_round_commit()

    def spec_round_rollback(self, keep: int | Sequence[int]) -> None:
        """Keep the first `keep` positions of each row of the round, in every kind or in none."""
        ends = self.rollback_ends(keep)
        for batch in self._batches:
            batch.end_round(ends)

    def rollback_ends(self, keep: int | Sequence[int]) -> dict[int, int]:
        """Return the ends that `spec_round_rollback(keep)` would leave, or raise as it would; nothing changes."""
        # The kinds hold the same rows, so the acceptance is held against the books of one.
        first, *others = self._batches
        ends = first.rollback_ends(keep)
        for batch in others:
            batch.check_rollback(ends)
        return ends

    # ---- contents ----------------------------------------------------------------------------------------------

    def extract(self, slot: int, *, first: int = 0) -> list[object]:
        """Return single-row caches of a row, one per layer, in buffers of their own, see `RowBatch.extract`."""
        caches = [batch.extract(slot, first=first) for batch in self._batches]
        return [_gathered(place, caches) for place in self._places]

    def convert(self, slot: int) -> None:
        """Quantize a row in every kind that is, one layer at a time, see `QuantizedRowBatch`."""
        for batch in self._batches:
            batch.convert(slot)

    def is_converted(self, slot: int) -> bool:
        """Return whether a row is in the forms that it will keep."""
        return all(batch.is_converted(slot) for batch in self._batches)

    # ---- facts -------------------------------------------------------------------------------------------------

    @property
    def arrays(self) -> list[mx.array]:
        """All buffers, for inspection and for `mx.eval`; do not keep the list."""
        return [array for batch in self._batches for array in batch.arrays]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers allocated now."""
        return sum(batch.nbytes for batch in self._batches)

    def check_integrity(self) -> None:
        """Check the books of every kind, and that they agree.

        Raises:
            IntegrityError: they do not.
        """
        for batch in self._batches:
            batch.check_integrity()
        books = [{slot: batch.end(slot) for slot in batch.joined} for batch in self._batches]
        if any(each != books[0] for each in books):
            raise IntegrityError(f"the kinds hold different rows: {books}")
        if len({batch.is_in_round for batch in self._batches}) != 1:
            raise IntegrityError("a round is open in some kinds and not in others")


def make_row_batch(
    prototypes: Sequence[object],
    *,
    max_rows: int,
    classes: CapacityClasses = DEFAULT_CLASSES,
    slack: int = DEFAULT_SLACK,
    starts_unquantized: bool = False,
) -> ModelRowBatch:
    """Make the slots of a model from one fresh single-row cache per layer.

    Args:
        prototypes: what the model's `make_cache()` gives, after the scheme has chosen the quantized layers.
        max_rows: most rows at once.
        classes: capacities of the slots.
        slack: positions that a ring can take back.
        starts_unquantized: whether rows of quantized layers are stored as they are until `convert(slot)`.

    Raises:
        UnsupportedCache: a cache that declares no kind of slots.
        InvalidGeometry: no prototype, or a count out of its range.
    """
    if not prototypes:
        raise InvalidGeometry("prototypes is empty; a model has at least one cache-owning layer")
    kinds: dict[RowKind, int] = {}

    def place(cache: object) -> Place:
        if isinstance(cache, CacheList):
            return [place(part) for part in cache.caches]
        kind = row_kind(cache, starts_unquantized=starts_unquantized)
        counts[kind] = counts.get(kind, 0) + 1
        return kinds.setdefault(kind, len(kinds)), counts[kind] - 1

    counts: dict[RowKind, int] = {}
    places = [place(prototype) for prototype in prototypes]
    batches = [kind.make(counts[kind], max_rows=max_rows, classes=classes, slack=slack) for kind in kinds]
    return ModelRowBatch(places, batches)


def _pick(place: Place, views: Sequence[Sequence[LayerView]]) -> LayerView:
    if isinstance(place, list):
        return ListView([_pick(part, views) for part in place])
    return views[place[0]][place[1]]


def _spread(place: Place, cache: object, parts: list[list[object]]) -> None:
    if not isinstance(place, list):
        parts[place[0]][place[1]] = cache
        return
    if not isinstance(cache, CacheList) or len(cache.caches) != len(place):
        raise UnsupportedCache(f"a {type(cache).__name__} is given for a layer that owns {len(place)} caches")
    for part, own in zip(place, cache.caches, strict=True):
        _spread(part, own, parts)


def _gathered(place: Place, caches: Sequence[Sequence[object]]) -> object:
    if isinstance(place, list):
        return CacheList(*(_gathered(part, caches) for part in place))  # pyright: ignore[reportArgumentType]
    return caches[place[0]][place[1]]
