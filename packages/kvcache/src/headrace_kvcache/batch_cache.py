"""mlx-lm's view of slots: one layer of a batch as an object that its models and its `BatchGenerator` accept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import mlx.core as mx

from headrace_kvcache.attention import causal_mask
from headrace_kvcache.buffers import SlotBuffers
from headrace_kvcache.capacity import power_of_two_at_least
from headrace_kvcache.columns import Columns, LinearColumns, RingColumns
from headrace_kvcache.contents import read_seat, write_seat
from headrace_kvcache.dense import close_up, take_over
from headrace_kvcache.errors import (
    EmptyCache,
    IntegrityError,
    InvalidGeometry,
    InvalidLength,
    NotTrimmable,
    RoundRefusedError,
    UnsupportedCache,
)
from headrace_kvcache.fields import slabs
from headrace_kvcache.placement import Placement
from headrace_kvcache.ring_rows import DEFAULT_SLACK
from headrace_kvcache.rounds import RoundBooks, check_drafts
from headrace_kvcache.single_rows import make_single, read_single, single_columns
from headrace_kvcache.stored import check_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_kvcache.attention import Mask
    from headrace_kvcache.forms import Fields, StoredForm
    from headrace_kvcache.single_rows import SingleCache


class BatchCache:
    """One layer of rows in dense slots, in mlx-lm's batch protocol; made by `merge_caches`.

    Rows are left-aligned and written at their own ends, so that joining copies the joiner's bytes only and leaving
    those of the rows that move into the gap. Prompts may be padded on the right (`prepare`, then `finalize`), plain
    rows also on the left. `update_and_fetch` gives plain arrays whatever the form is.

    Args:
        form: what is stored.
        columns: where positions lie.
        num_rows: B, rows that hold nothing yet.
    """

    def __init__(self, form: StoredForm, columns: Columns, num_rows: int) -> None:
        self._form = form
        self._columns = columns
        self._buffers = SlotBuffers()
        self._ends = [0] * num_rows
        self._written = [0] * num_rows
        self._floors = [0] * num_rows
        self._paddings = [0] * num_rows
        self._lengths: list[int] | None = None
        self._right_padding: list[int] | None = None
        self._round = RoundBooks()
        self._placed: Placement | None = None

    # ---- what models call --------------------------------------------------------------------------------------

    @property
    def offset(self) -> mx.array:
        """The position of each row's next input, `(B,) int32`; negative while it is left padding."""
        return mx.array([end - pad for end, pad in zip(self._ends, self._paddings, strict=True)], mx.int32)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `keys (B, H, T, D)` and `values (B, H, T, Dv)` and return what `make_mask` says the queries see.

        Raises:
            InvalidGeometry: other rows, heads, sizes or dtypes than before.
        """
        self._form.check(keys, values)
        added = self._form.encode(keys, values)
        self._check_added(added)
        num_tokens = keys.shape[2]
        placed = self._place(num_tokens)
        if any(self._paddings):
            added = _left_aligned(added, self._paddings)
        self._buffers.reserve(added, size=self._size(placed.num_columns))
        seen: Fields = ()
        if placed.is_beside:
            columns, _ = self._columns.beside(placed.starts, num_tokens, None)
            held = self._read(columns.stop)
            seen = tuple(mx.concatenate([old, new], axis=2) for old, new in zip(held, added, strict=True))
        placed.store(self._buffers.fields, added)
        fetched = seen or self._read(self._num_seen(placed))
        self._appended(placed)
        return self._form.decode(fetched)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what all rows hold, up to the longest one's end or the whole ring.

        Raises:
            EmptyCache: nothing was appended yet.
        """
        if not self._buffers.fields:
            raise EmptyCache("the cache holds nothing yet; append keys and values first")
        limit, longest = self._columns.limit, max(self._ends)
        return self._form.decode(self._read(longest if limit is None else min(longest, limit)))

    def make_mask(self, num_tokens: int, *, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Return the mask over what the next append of `num_tokens` positions will return.

        Returns:
            None if nothing is masked, `"causal"`, or a boolean `(B, 1, num_tokens, L)`.
        """
        placed = self._place(num_tokens)
        if any(self._paddings):
            return self._padded_mask(placed, window_size)
        if placed.is_beside:
            return self._columns.beside(placed.starts, num_tokens, window_size)[1]
        _, mask = self._columns.span(placed.starts, num_tokens, window_size, last=placed.last, is_trimmed=False)
        if isinstance(mask, str) and return_array:
            last = placed.last
            return causal_mask(mx.arange(last - num_tokens, last)[:, None], range(last))
        return mask

    def _padded_mask(self, placed: Placement, window: int | None) -> mx.array:
        asked = mx.array([end - pad for end, pad in zip(self._ends, self._paddings, strict=True)], mx.int32)
        positions = asked[:, None, None, None] + mx.arange(placed.num_tokens)[:, None]
        mask = causal_mask(positions, range(placed.last), window=window)
        # A padding query must see something: a softmax over nothing is NaN.
        return mask | ((positions < 0) & (mx.arange(placed.last) == 0))

    # ---- prompts of different lengths --------------------------------------------------------------------------

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Tell how the coming inputs are padded.

        Args:
            left_padding: per row, inputs on the left that are no tokens; for plain rows that hold nothing.
            lengths: per row, how many of the coming inputs are tokens if they are padded on the right.
            right_padding: per row, inputs on the right that are no tokens.

        Raises:
            InvalidLength: left padding of rows that hold something or of rings, or a count per row too few.
        """
        if left_padding is not None:
            if any(self._ends) or self._columns.limit is not None:
                raise InvalidLength("left padding needs rows that hold nothing and are no rings; pad on the right")
            self._check_one_per_row(left_padding)
            self._paddings = [pad + more for pad, more in zip(self._paddings, left_padding, strict=True)]
        if right_padding is not None and max(right_padding) > 0:
            self._check_one_per_row(right_padding if lengths is None else lengths)
            if lengths is None and self._columns.limit is not None:
                raise InvalidLength("a ring needs the lengths of right-padded rows, or padding would overwrite it")
            self._lengths = None if lengths is None else list(lengths)
            self._right_padding = list(right_padding)
        self._placed = None

    def finalize(self) -> None:
        """Forget the padding on the right: the inputs that `prepare` announced have come."""
        if self._right_padding is not None and self._lengths is None:
            self._ends = [end - pad for end, pad in zip(self._ends, self._right_padding, strict=True)]
        self._lengths = self._right_padding = self._placed = None

    def _check_one_per_row(self, counts: Sequence[int]) -> None:
        if len(counts) != len(self._ends):
            raise InvalidLength(f"{len(counts)} counts are given for {len(self._ends)} rows; there must be one per row")

    # ---- rows --------------------------------------------------------------------------------------------------

    @classmethod
    def merge(cls, caches: Sequence[object]) -> Self:
        """Make a batch of single-row caches of one kind, copying each one's bytes; they stay as they are.

        A single row shares its cache's bytes until one of the two is written.

        Raises:
            UnsupportedCache: a cache of another kind.
            InvalidGeometry: no cache, or caches that differ in form, window or kept positions.
        """
        rows = [read_single(cache) for cache in caches]
        kinds = {(row.form.key, row.geometry) for row in rows}
        if len(kinds) != 1:
            raise InvalidGeometry(f"caches of (form, geometry) {sorted(map(str, kinds))} cannot be merged")
        window, keep, chunk_size = rows[0].geometry
        if chunk_size is not None:
            raise UnsupportedCache("chunked caches cannot be merged; give their rows slots with make_row_batch")
        columns = LinearColumns() if window is None else RingColumns(window, keep=keep, slack=DEFAULT_SLACK)
        batch = cls(rows[0].form, columns, len(rows))
        batch._ends = [row.end for row in rows]
        batch._written = list(batch._ends)
        batch._floors = [columns.floor(row.end) for row in rows]
        if len(rows) == 1 and not batch._floors[0]:
            # Views of the single cache, which are written only after a copy: a joiner's bytes are copied once.
            batch._buffers.fields = rows[0].fields
            return batch
        for seat, row in enumerate(rows):
            if row.fields:
                batch._check_added(row.fields, num_rows=1)
                batch._buffers.reserve(row.fields, size=batch._size(batch._needed()))
                write_seat(batch._buffers.fields, seat, row.end, columns, row.fields)
        return batch

    def extract(self, index: int) -> SingleCache:
        """Return a single-row cache of one row, in buffers of its own."""
        end = self._ends[index]
        capacity = single_columns(self._columns, end)
        held = read_seat(self._buffers.fields, index, end, self._columns, num_columns=capacity) if end else ()
        return make_single(self._form, self._columns, end, held)

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep the given rows, in the given order; only rows that change their place are copied.

        An open round is forgotten.
        """
        chosen: list[int] = batch_indices.tolist() if isinstance(batch_indices, mx.array) else list(batch_indices)  # pyright: ignore[reportAssignmentType]
        self._ends, self._written, self._floors, self._paddings = (
            [numbers[index] for index in chosen]
            for numbers in (self._ends, self._written, self._floors, self._paddings)
        )
        if self._lengths is not None:
            self._lengths = [self._lengths[index] for index in chosen]
        if self._right_padding is not None:
            self._right_padding = [self._right_padding[index] for index in chosen]
        self._placed = None
        self._round = RoundBooks()
        _, count = self._size(self._needed())
        close_up(self._buffers, chosen, num_columns=count, num_used=self._needed())

    def extend(self, other: BatchCache) -> None:
        """Take over the rows of another batch of the same kind, copying their bytes only.

        Raises:
            InvalidGeometry: another form, layout, geometry or dtype.
            InvalidLength: a batch whose right padding is not finalized.
            RoundRefusedError: a round is open in one of the two.
        """
        if self.is_in_round or other.is_in_round:
            raise RoundRefusedError("a round is open; commit it or roll it back before rows join")
        if (other._form.key, other._columns.geometry) != (self._form.key, self._columns.geometry):
            raise InvalidGeometry(f"a batch of {other._form.key} cannot extend one of {self._form.key}")
        if self._right_padding is not None or other._right_padding is not None:
            raise InvalidLength("a padded prompt is not finished; call finalize() first")
        if other._buffers.fields:
            self._check_added(other._buffers.fields, num_rows=other._buffers.fields[0].shape[0])
        first = len(self._ends)
        self._ends += other._ends
        self._written += other._written
        self._floors += other._floors
        self._paddings += other._paddings
        self._placed = None
        if self._buffers.fields:
            # Rows that hold nothing get their seats too, so that no later copy reaches beyond the buffers.
            self._buffers.reserve(self._buffers.fields, size=self._size(self._needed()))
        if other._buffers.fields:
            take_over(
                self._buffers,
                other._buffers,
                first=first,
                num_rows=len(other._ends),
                size=self._size(self._needed()),
                num_used=other._needed(),
            )

    # ---- going back --------------------------------------------------------------------------------------------

    def is_trimmable(self) -> bool:
        """Return whether any number of positions can be forgotten in every row."""
        return all(self._least_end(row) == 0 for row in range(len(self._ends)))

    def trim(self, num_tokens: int) -> int:
        """Forget the last `num_tokens` positions of every row, at most all, and return the largest number forgotten.

        Raises:
            InvalidLength: a negative number, or not an integer.
            NotTrimmable: a ring has overwritten what a row would need; no row is changed.
        """
        check_count(num_tokens)
        targets = [max(0, end - num_tokens) for end in self._ends]
        for row, target in enumerate(targets):
            if target < min(self._least_end(row), self._ends[row]):
                raise NotTrimmable(f"row {row} cannot go back to {target}: the ring has overwritten what it would need")
        trimmed = max((end - target for end, target in zip(self._ends, targets, strict=True)), default=0)
        self._ends, self._placed = targets, None
        return trimmed

    def _least_end(self, row: int) -> int:
        return max(self._floors[row], self._columns.least_end(self._ends[row], self._written[row]))

    @property
    def is_in_round(self) -> bool:
        """Whether a round of speculation is open."""
        return self._round.is_open

    def spec_round_fits(self, drafts: int) -> bool:
        """Return whether every row can keep any part of a step of drafts + 1 positions."""
        check_drafts(drafts)
        return all(self._columns.fits_in_place(end, drafts + 2) for end in self._ends)

    def spec_round_begin(self) -> None:
        """Open a round of all rows.

        Raises:
            RoundRefusedError: a round is open.
        """
        self._round.begin(dict(enumerate(self._ends)))

    def spec_round_commit(self) -> None:
        """Keep everything that was appended since `spec_round_begin`.

        Raises:
            RoundRefusedError: no round is open.
        """
        self._round.close()

    def spec_round_rollback(self, keep: int | Sequence[int]) -> None:
        """Keep the first `keep` positions of each row that were appended since `spec_round_begin`.

        Raises:
            RoundRefusedError: no round is open, or a ring has overwritten what a row would need.
            InvalidCountError: a count that is not from 0 to what the row appended.
        """
        self._ends, self._placed = list(self.rollback_ends(keep).values()), None
        self._round.close()

    def rollback_ends(self, keep: int | Sequence[int]) -> dict[int, int]:
        """Return the ends that `spec_round_rollback(keep)` would leave, or raise as it would; nothing changes."""
        targets = self._round.targets(keep, self._ends)
        # Without a limit nothing is ever overwritten, and a floor lies below where the round began.
        for row, end in targets.items() if self._columns.limit is not None else ():
            if end < self._least_end(row):
                raise RoundRefusedError(f"row {row} cannot go back to {end}: ask spec_round_fits(drafts) first")
        return targets

    # ---- facts -------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check the books against the buffers, without evaluating anything.

        Raises:
            IntegrityError: they disagree.
        """
        books = (self._written, self._floors, self._paddings)
        if any(len(numbers) != len(self._ends) for numbers in books):
            raise IntegrityError(f"the books have {[len(numbers) for numbers in books]} rows, not {len(self._ends)}")
        for row, end in enumerate(self._ends):
            if not self._floors[row] <= end <= self._written[row]:
                raise IntegrityError(
                    f"row {row} ends at {end}, outside of its floor {self._floors[row]} and of what was written, "
                    f"{self._written[row]}"
                )
        shapes = {field.shape[:3] for field in self._buffers.fields}
        for num_seats, _, num_columns in shapes:
            if len(shapes) > 1 or num_seats < len(self._ends) or num_columns < self._needed():
                raise IntegrityError(f"buffers {sorted(shapes)} do not hold {len(self._ends)} rows to {self._needed()}")
        self._round.check_integrity(range(len(self._ends)))

    def size(self) -> int:
        """Return the number of positions of the longest row."""
        return max(self._ends, default=0)

    def empty(self) -> bool:
        """Return whether nothing was ever appended."""
        return not self._buffers.fields

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers allocated now."""
        return self._buffers.nbytes

    @property
    def state(self) -> tuple[Fields, list[int]]:
        """Buffers in array objects of their own, and ends; drop it before the next append."""
        return tuple(field[:] for field in self._buffers.fields), list(self._ends)

    def __deepcopy__(self, memo: dict[int, object]) -> BatchCache:
        """Return a batch of the same rows; the two share bytes until one of them is written."""
        del memo
        other = BatchCache(self._form, self._columns, len(self._ends))
        other._buffers.fields, other._ends = self.state
        other._written, other._floors, other._paddings = list(self._written), list(self._floors), list(self._paddings)
        other._lengths = None if self._lengths is None else list(self._lengths)
        other._right_padding = None if self._right_padding is None else list(self._right_padding)
        return other

    # ---- inside ------------------------------------------------------------------------------------------------

    def _place(self, num_tokens: int) -> Placement:
        if self._placed is None or self._placed.num_tokens != num_tokens:
            counts = [
                max(0, min(num_tokens, real) - min(num_tokens, pad))
                for real, pad in zip(self._lengths or [num_tokens] * len(self._ends), self._paddings, strict=True)
            ]
            self._placed = Placement(
                range(len(self._ends)),
                self._ends,
                counts,
                num_tokens,
                columns=self._columns,
                room=self._columns.limit,
            )
        return self._placed

    def _appended(self, placed: Placement) -> None:
        num_tokens = placed.num_tokens
        self._written = [max(old, new) for old, new in zip(self._written, placed.written, strict=True)]
        self._ends = [end + count for end, count in zip(self._ends, placed.counts, strict=True)]
        self._paddings = [max(0, pad - num_tokens) for pad in self._paddings]
        if self._lengths is not None:
            self._lengths = [max(0, real - num_tokens) for real in self._lengths]
        self._placed = None

    def _num_seen(self, placed: Placement) -> int:
        limit = self._columns.limit
        return placed.last if limit is None else min(placed.last, limit)

    def _needed(self) -> int:
        limit, written = self._columns.limit, max(self._written, default=0)
        return written if limit is None else min(written, limit)

    def _size(self, num_columns: int) -> tuple[int, int]:
        held, limit = self._buffers.fields, self._columns.limit
        if held and held[0].shape[2] >= num_columns:
            return power_of_two_at_least(len(self._ends)), held[0].shape[2]
        # All rows share their columns, so these grow by an eighth and not by doubling.
        columns = slabs(num_columns + num_columns // 8)
        return power_of_two_at_least(len(self._ends)), columns if limit is None else min(columns, limit)

    def _read(self, num_columns: int) -> Fields:
        rows = len(self._ends)
        return tuple(field[:rows, :, :num_columns] for field in self._buffers.fields)

    def _check_added(self, added: Fields, *, num_rows: int | None = None) -> None:
        rows = len(self._ends) if num_rows is None else num_rows
        if any(new.shape[0] != rows for new in added):
            raise InvalidGeometry(f"arrays of {added[0].shape[0]} rows are given; this batch has {rows}")
        for held, new in zip(self._buffers.fields, added, strict=bool(self._buffers.fields)):
            if (held.shape[1], held.shape[3], held.dtype) != (new.shape[1], new.shape[3], new.dtype):
                raise InvalidGeometry(
                    f"arrays {new.shape} {new.dtype} do not fit a batch that holds {held.shape} {held.dtype}; one "
                    f"cache holds one layer of one model"
                )


def _left_aligned(added: Fields, paddings: Sequence[int]) -> Fields:
    """Return the fields with each row's left padding moved behind its tokens."""
    num_tokens = added[0].shape[2]
    shifts = mx.array([min(pad, num_tokens) for pad in paddings], mx.int32)[:, None]
    order = mx.remainder(mx.arange(num_tokens) + shifts, num_tokens)[:, None, :, None]
    return tuple(mx.take_along_axis(field, order, axis=2) for field in added)
