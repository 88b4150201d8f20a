"""Single-row caches that hold a sliding window: a ring, plain or affine-quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, TypeAlias

from headrace_kvcache.errors import EmptyCache, IntegrityError, NotTrimmable
from headrace_kvcache.fields import joined, part, slabs, with_room, write
from headrace_kvcache.forms import AffineForm, PlainForm
from headrace_kvcache.merging import Mergeable
from headrace_kvcache.ring import Ring, check_ring
from headrace_kvcache.stored import StoredCache, check_count

if TYPE_CHECKING:
    from headrace_kvcache.forms import Fields, StoredForm
    from headrace_kvcache.masks import Mask
    from headrace_kvcache.stored import Side

State: TypeAlias = "tuple[Side, Side, int, int, int, int]"
QuantizedState: TypeAlias = "tuple[Side, Side, int, int, int, int, int, int]"


class RotatingCache(StoredCache, Mergeable):
    """A position sees the first `keep` positions and the last ones, `max_size` in all, itself included.

    Appending positions one by one or many at once gives the same attention. At rest the buffers hold
    `min(ceil(offset / 256) * 256, max_size)` columns; after an append of several positions past the wrap they hold
    `max_size - 1` plus these until the next append or `compact`, because its queries see that far back. In a round of
    speculation they hold `max_size` plus what the round appends, so that a rollback finds what it would overwrite.

    Attributes:
        offset: number of positions appended and not trimmed; positions and rope count from the first one.
    """

    def __init__(self, form: StoredForm, max_size: int, keep: int) -> None:
        check_ring(max_size, keep)
        super().__init__(form)
        self._max_size = max_size
        self._keep = keep
        self._head = 0

    @property
    def max_size(self) -> int:
        """Positions that a query sees, kept ones and itself included."""
        return self._max_size

    @property
    def keep(self) -> int:
        """First positions that are never overwritten."""
        return self._keep

    @property
    def _ring(self) -> Ring:
        num_columns = self.offset
        if self._fields is not None and self._head != self.offset:
            num_columns = self._fields[0].shape[2]
        return Ring(self._max_size, self._keep, self.offset, self._head, num_columns)

    def _after(self, num_tokens: int) -> Ring:
        drafted = self.offset - self._round.started()[0] if self._round.is_open else None
        return self._ring.after(num_tokens, drafted=drafted)

    def _append(self, added: Fields, num_tokens: int) -> None:
        ring, old, after = self._ring, self._fields, self._after(num_tokens)
        if old is None or (after.is_linear and after.end <= self._max_size):
            capacity = max(after.num_columns, min(slabs(after.end), self._max_size))
            fields = with_room(old, added, used=ring.end, end=after.end, capacity=capacity)
            write(fields, added, ring.end)
        elif num_tokens == 1 and not self._round.is_open:
            fields = old if old[0].shape[2] == self._max_size else _in_time_order(old, ring, self._max_size)
            write(fields, added, after.head - 1)
        else:
            fields = joined([_in_time_order(old, ring, after.num_columns - num_tokens), added])
        self._fields, self._head, self.offset = fields, after.head, after.end

    def compact(self) -> None:
        """Drop what only the queries of the last append could see: call it between prefill chunks to save memory.

        Nothing is dropped in a round of speculation, which may need it.
        """
        ring = self._ring
        if self._fields is not None and not ring.is_at_rest and not self._round.is_open:
            self._fields = _in_time_order(self._fields, ring, self._max_size)
            self._head = self._max_size

    def _held(self) -> Fields:
        if self._fields is None:
            raise EmptyCache("the cache holds nothing yet; append keys and values first")
        return part(self._fields, 0, self._ring.num_columns)

    def _seen(self, num_tokens: int, window: int | None) -> tuple[Fields, Mask]:
        return self._held(), self._ring.mask(num_tokens, window)

    def make_mask(self, num_tokens: int, *, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Return the mask that mlx-lm's models ask for before they append `num_tokens` positions."""
        return self._after(num_tokens).mask(num_tokens, window_size, as_array=return_array and num_tokens > 1)

    def trim(self, num_tokens: int) -> int:
        """Forget the last `num_tokens` positions, at most all, and return how many were forgotten.

        Raises:
            InvalidLength: a negative number, or not an integer.
            NotTrimmable: the ring is full, so that earlier positions would miss what was overwritten.
        """
        check_count(num_tokens)
        if num_tokens and not self.is_trimmable():
            raise NotTrimmable(
                f"a ring of {self._max_size} positions that has reached {self.offset} cannot be trimmed by "
                f"{num_tokens}: what earlier positions see is overwritten; ask is_trimmable() first"
            )
        trimmed = min(self.offset, num_tokens)
        self.offset -= trimmed
        if trimmed:
            self._head = self.offset
        return trimmed

    def _forget_from(self, end: int) -> None:
        if end == self.offset:
            return
        ring = self._ring.without_last(self.offset - end)
        # Before the wrap there may be stale columns up to the whole ring, as after a trim.
        columns = max(ring.end, self._max_size) if ring.is_linear else ring.num_columns
        if self._fields is not None and self._fields[0].shape[2] > columns:
            self._fields = part(self._fields, 0, columns)
        self._head, self.offset = ring.head, ring.end

    def check_integrity(self) -> None:
        """Check the books against the buffers, without evaluating anything.

        Raises:
            IntegrityError: they disagree.
        """
        super().check_integrity()
        if not 0 <= self._head <= self.offset:
            raise IntegrityError(f"the newest of {self.offset} positions cannot lie before column {self._head}")

    def _num_stored(self) -> int:
        return max(self._head, self._ring.num_columns)

    def is_trimmable(self) -> bool:
        """Return whether the ring is not yet full."""
        return self.offset < self._max_size

    def size(self) -> int:
        """Return the number of positions that the next query can see."""
        return min(self.offset, self._max_size)

    def _num_whole(self) -> int:
        return self._ring.num_whole


class RotatingQuantizedKVCache(RotatingCache):
    """A ring of affine triples; `attend` works on the packed bits, `update_and_fetch` gives dequantized arrays.

    Args:
        max_size: positions that a query sees, kept ones and itself included.
        keep: first positions that are never overwritten.
        bits: bits per element: 2, 3, 4, 5, 6 or 8.
        group_size: elements of a head that share a scale and a bias: 32, 64 or 128.

    Raises:
        InvalidGeometry: sizes, bits or a group size outside their range.
    """

    def __init__(self, max_size: int, keep: int = 0, *, bits: int = 8, group_size: int = 64) -> None:
        self._affine = AffineForm(bits, group_size)
        super().__init__(self._affine, max_size, keep)

    @property
    def state(self) -> QuantizedState:
        """Triples, offset, keep, max_size, head, group size and bits, in array objects of their own."""
        numbers = (self.offset, self._keep, self._max_size, self._head, self._affine.group_size, self._affine.bits)
        return (*self._sides(), *numbers)

    @state.setter
    def state(self, state: QuantizedState) -> None:
        keys, values, self.offset, self._keep, self._max_size, self._head, group_size, bits = state
        self._form = self._affine = AffineForm(bits, group_size)
        self._set_sides(keys, values)

    @classmethod
    def from_state(cls, state: QuantizedState) -> Self:
        """Make a cache from another one's `state`; the two share bytes until one of them is written."""
        cache = cls(state[4], state[3], bits=state[7], group_size=state[6])
        cache.state = state
        cache.state = cache.state
        return cache


class RotatingKVCache(RotatingCache):
    """A ring of keys and values as they come.

    Args:
        max_size: positions that a query sees, kept ones and itself included.
        keep: first positions that are never overwritten.

    Raises:
        InvalidGeometry: sizes outside their range.
    """

    def __init__(self, max_size: int, keep: int = 0) -> None:
        super().__init__(PlainForm(), max_size, keep)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> RotatingQuantizedKVCache:
        """Return a quantized ring of the same positions, at rest; mlx-lm's generation calls it by these names.

        Raises:
            InvalidGeometry: bits or a group size that MLX does not pack, or a head that is not made of whole groups.
        """
        quantized = RotatingQuantizedKVCache(self._max_size, self._keep, bits=bits, group_size=group_size)
        if self._fields is None or not self.offset:
            return quantized
        ring = self._ring
        fields = self._fields if ring.is_at_rest else _in_time_order(self._fields, ring, self._max_size)
        form, count = quantized.form, quantized.form.num_key_fields
        keys, values = fields
        form.check(keys, values)
        encoded, ring = form.encode(keys, values), ring.at_rest()
        numbers = (self.offset, self._keep, self._max_size, ring.head, group_size, bits)
        quantized.state = (encoded[:count], encoded[count:], *numbers)
        return quantized

    @property
    def state(self) -> State:
        """Buffers, offset, keep, max_size and head, in array objects of their own; drop them before an append."""
        return (*self._sides(), self.offset, self._keep, self._max_size, self._head)

    @state.setter
    def state(self, state: State) -> None:
        keys, values, self.offset, self._keep, self._max_size, self._head = state
        self._set_sides(keys, values)

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Make a cache from another one's `state`; the two share bytes until one of them is written."""
        cache = cls(state[4], state[3])
        cache.state = state
        cache.state = cache.state
        return cache


def _in_time_order(fields: Fields, ring: Ring, limit: int) -> Fields:
    return joined([part(fields, start, stop) for start, stop in ring.pieces(limit)])
