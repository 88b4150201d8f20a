"""Batches of single-row caches as mlx-lm's `BatchGenerator` uses them: `merge_caches` and the kinds without slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, TypeAlias

import mlx.core as mx

from headrace_kvcache.batch_cache import BatchCache
from headrace_kvcache.composite import CacheList
from headrace_kvcache.errors import IntegrityError, InvalidGeometry, RoundRefusedError, UnsupportedCache
from headrace_kvcache.recurrent import RecurrentCache
from headrace_kvcache.rounds import RoundBooks

if TYPE_CHECKING:
    from collections.abc import Sequence

AnyBatch: TypeAlias = "BatchCache | BatchRecurrentCache | BatchCacheList"


def merge_caches(caches: Sequence[object]) -> AnyBatch:
    """Make a batch of one layer's single-row caches, one per row, copying each one's bytes; they stay as they are.

    Raises:
        UnsupportedCache: a kind that cannot share a batch.
        InvalidGeometry: no cache, or caches of different kinds.
    """
    if not caches:
        raise InvalidGeometry("caches is empty; a batch is made of at least one row")
    if isinstance(caches[0], CacheList):
        return BatchCacheList.merge(caches)
    if isinstance(caches[0], RecurrentCache):
        return BatchRecurrentCache.merge(caches)
    return BatchCache.merge(caches)


class BatchRecurrentCache(RecurrentCache):
    """One recurrent layer of several rows, in mlx-lm's batch protocol.

    Its arrays have no time axis and are replaced by every step, so that rows need no slots. Layers leave out padding
    on the right by `lengths`.
    """

    __slots__ = ("_ends", "_remaining")

    def __init__(self, size: int, ends: Sequence[int]) -> None:
        super().__init__(size)
        self._ends = list(ends)
        self._remaining: list[int] | None = None

    @classmethod
    def merge(cls, caches: Sequence[object]) -> Self:
        """Make a batch of single-row caches, zeros for a row that holds nothing.

        Raises:
            UnsupportedCache: a cache of another kind.
            InvalidGeometry: caches of different sizes.
        """
        singles: list[RecurrentCache] = []
        for cache in caches:
            if not isinstance(cache, RecurrentCache):
                raise UnsupportedCache(f"a {type(cache).__name__} cannot be merged with recurrent caches")
            singles.append(cache)
        states = [cache.state[0] for cache in singles]
        if len({len(arrays) for arrays in states}) != 1:
            raise InvalidGeometry(f"caches of {sorted({len(arrays) for arrays in states})} arrays cannot be merged")
        batch = cls(len(states[0]), [cache.offset for cache in singles])
        batch._arrays = [_joined([(arrays[index], 1) for arrays in states]) for index in range(len(states[0]))]
        told = [cache.can_replay for cache in singles]
        batch.can_replay = False if False in told else (True if True in told else None)
        return batch

    def advance(self, num_tokens: int) -> None:
        """Tell that `num_tokens` inputs per row were summed up."""
        super().advance(num_tokens)
        self._ends = [end + count for end, count in zip(self._ends, self._counts_of(num_tokens), strict=True)]
        if self._remaining is not None:
            self._remaining = [max(0, count - num_tokens) for count in self._remaining]

    def _counts_of(self, num_tokens: int) -> tuple[int, ...]:
        if self._remaining is None:
            return (num_tokens,) * len(self._ends)
        return tuple(min(num_tokens, count) for count in self._remaining)

    def _row_ends(self) -> dict[int, int]:
        return dict(enumerate(self._ends))

    def _set_row_ends(self, ends: dict[int, int]) -> None:
        self._ends = list(ends.values())

    def check_integrity(self) -> None:
        """Check that the arrays have a row for each end, without evaluating anything.

        Raises:
            IntegrityError: they have not.
        """
        super().check_integrity()
        for array in self.arrays:
            if array.shape[0] != len(self._ends):
                raise IntegrityError(f"an array {array.shape} is held for {len(self._ends)} rows")
        self._round.check_integrity(range(len(self._ends)))

    def prepare(
        self,
        *,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
        left_padding: Sequence[int] | None = None,
    ) -> None:
        """Tell how many of the coming inputs of each row are real.

        Raises:
            InvalidGeometry: left padding, or right padding without lengths.
        """
        if left_padding is not None or (lengths is None and right_padding is not None and max(right_padding) > 0):
            raise InvalidGeometry("recurrent rows leave out padding on the right by `lengths` only")
        if lengths is not None:
            self.lengths = mx.array(list(lengths), mx.int32)
            self._remaining = list(lengths)

    def finalize(self) -> None:
        """Forget the padding: the inputs that `prepare` announced have come."""
        self.lengths = self._remaining = None

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep the given rows, in the given order; an open round is forgotten."""
        chosen: list[int] = batch_indices.tolist() if isinstance(batch_indices, mx.array) else list(batch_indices)  # pyright: ignore[reportAssignmentType]
        rows = mx.array(chosen, mx.int32)
        self._arrays = [None if array is None else array[rows] for array in self._arrays]
        self._round = RoundBooks()
        self._forget_round()
        self._ends = [self._ends[row] for row in chosen]
        if self._remaining is not None:
            self._remaining = [self._remaining[row] for row in chosen]
            self.lengths = mx.array(self._remaining, mx.int32)

    def extend(self, other: BatchRecurrentCache) -> None:
        """Take over the rows of another batch.

        Raises:
            RoundRefusedError: a round is open in one of the two.
        """
        if self.is_in_round or other.is_in_round:
            raise RoundRefusedError("a round is open; commit it or roll it back before rows join")
        self._arrays = [
            _joined([(mine, len(self._ends)), (theirs, len(other._ends))])
            for mine, theirs in zip(self._arrays, other._arrays, strict=True)
        ]
        self._ends += other._ends
        if self.can_replay is None or other.can_replay is False:
            self.can_replay = other.can_replay

    def extract(self, index: int) -> RecurrentCache:
        """Return a single-row cache of one row, with arrays of its own."""
        cache = RecurrentCache(len(self._arrays))
        arrays = [None if array is None else mx.contiguous(array[index : index + 1]) for array in self._arrays]
        cache.state = (arrays, None, self._ends[index])
        cache.can_replay = self.can_replay
        return cache

    def __deepcopy__(self, memo: dict[int, object]) -> BatchRecurrentCache:
        """Return a batch of the same rows, in array objects of its own."""
        del memo
        other = BatchRecurrentCache(len(self._arrays), self._ends)
        other._arrays = [None if array is None else array[:] for array in self._arrays]
        other.offset, other.lengths, other.can_replay = self.offset, self.lengths, self.can_replay
        other._remaining = None if self._remaining is None else list(self._remaining)
        return other


class BatchCacheList:
    """The batches of one layer that owns several caches, by index, in mlx-lm's batch protocol.

    Args:
        *caches: at least one.
    """

    __slots__ = ("caches",)

    def __init__(self, *caches: AnyBatch) -> None:
        self.caches = caches

    @classmethod
    def merge(cls, caches: Sequence[object]) -> Self:
        """Make a batch of lists of single-row caches.

        Raises:
            UnsupportedCache: a cache that is no list, or of another kind at its index.
            InvalidGeometry: lists of different lengths.
        """
        lists: list[CacheList] = []
        for cache in caches:
            if not isinstance(cache, CacheList):
                raise UnsupportedCache(f"a {type(cache).__name__} cannot be merged with lists of caches")
            lists.append(cache)
        if len({len(each.caches) for each in lists}) != 1:
            raise InvalidGeometry(f"lists of {sorted({len(each.caches) for each in lists})} caches cannot be merged")
        return cls(*(merge_caches(parts) for parts in zip(*(each.caches for each in lists), strict=True)))

    def __getitem__(self, index: int) -> AnyBatch:
        return self.caches[index]

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Tell every cache how the coming inputs are padded."""
        for cache in self.caches:
            cache.prepare(left_padding=left_padding, lengths=lengths, right_padding=right_padding)

    def finalize(self) -> None:
        """Forget the padding in every cache."""
        for cache in self.caches:
            cache.finalize()

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep the given rows in every cache."""
        for cache in self.caches:
            cache.filter(batch_indices)

    def extend(self, other: BatchCacheList) -> None:
        """Take over the rows of another batch in every cache."""
        for cache, more in zip(self.caches, other.caches, strict=True):
            cache.extend(more)  # pyright: ignore[reportArgumentType]

    def extract(self, index: int) -> CacheList:
        """Return the single-row caches of one row."""
        return CacheList(*(cache.extract(index) for cache in self.caches))

    def is_trimmable(self) -> bool:
        """Return whether every cache is trimmable."""
        return all(cache.is_trimmable() for cache in self.caches)

    @property
    def is_in_round(self) -> bool:
        """Whether a round of speculation is open."""
        return self.caches[0].is_in_round

    def spec_round_fits(self, drafts: int) -> bool:
        """Return whether every cache can take the drafts back."""
        return all(cache.spec_round_fits(drafts) for cache in self.caches)

    def spec_round_begin(self) -> None:
        """Open a round of all rows in every cache.

        Raises:
            RoundRefusedError: a round is open.
        """
        for cache in self.caches:
            cache.spec_round_begin()

    def spec_round_commit(self) -> None:
        """Keep everything that was appended since `spec_round_begin`.

        Raises:
            RoundRefusedError: no round is open.
        """
        for cache in self.caches:
            cache.spec_round_commit()

    def spec_round_rollback(self, keep: int | Sequence[int]) -> None:
        """Keep the first `keep` positions of each row of the round, in every cache or in none.

        Raises:
            RoundRefusedError: no round is open, or a cache cannot go back.
            InvalidCountError: a count that is not from 0 to what the row appended.
        """
        self.rollback_ends(keep)
        for cache in self.caches:
            cache.spec_round_rollback(keep)

    def rollback_ends(self, keep: int | Sequence[int]) -> dict[int, int]:
        """Return the ends that `spec_round_rollback(keep)` would leave, or raise as it would; nothing changes."""
        ends = [cache.rollback_ends(keep) for cache in self.caches]
        return ends[0]

    def check_integrity(self) -> None:
        """Check every cache.

        Raises:
            IntegrityError: the books of one and its buffers disagree.
        """
        for cache in self.caches:
            cache.check_integrity()

    def size(self) -> int:
        """Return the largest number of positions held."""
        return max(cache.size() for cache in self.caches)

    def empty(self) -> bool:
        """Return whether nothing was ever appended to the first cache."""
        return self.caches[0].empty()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers allocated now."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def state(self) -> list[object]:
        """The states of all caches, to be evaluated; drop it before the next append."""
        return [cache.state for cache in self.caches]


def _joined(parts: Sequence[tuple[mx.array | None, int]]) -> mx.array | None:
    """Join arrays of `(rows, ...)`, zeros for the rows of one that is not there."""
    like = next((array for array, _ in parts if array is not None), None)
    if like is None:
        return None
    zeros = [mx.zeros((count, *like.shape[1:]), like.dtype) if array is None else array for array, count in parts]
    return mx.concatenate(zeros)
