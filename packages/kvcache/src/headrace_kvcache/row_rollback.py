"""Rounds of speculation over the rows of a batch, each with its own acceptance: `bind_row_cache_rollback`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from headrace_kvcache.errors import IncompleteRoundError, InvalidCountError
from headrace_kvcache.rollback import RoundCalls, is_in_round, leaves
from headrace_kvcache.speculative_transaction import SpeculativeTransaction

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_kvcache.speculative_transaction import Keep


def bind_row_cache_rollback(
    caches: Sequence[object], rows: int, *, slots: Sequence[int] | None = None
) -> SpeculativeTransaction[Sequence[int]]:
    """Bind the batched caches of some rows to rounds of speculation; an acceptance is one number per row.

    A round without drafts touches no cache: its one token is committed already, so nothing can be rejected. In other
    rounds a row that has fewer drafts of its own, or none, is padded to the round's `drafts` and accepts fewer.

    Args:
        caches: one per layer (`BatchCache` and its like), or the slots of a whole model in a list of one.
        rows: how many rows take part.
        slots: which slots they are, strictly ascending, for batches of slots; None for all rows there are.

    Raises:
        IncompleteRoundError: a cache without `spec_round_begin`, `spec_round_commit` and `spec_round_rollback`.
        InvalidCountError: `rows` is not an integer of at least 1, or not the number of slots.
    """
    if type(rows) is not int or rows < 1:
        raise InvalidCountError(f"rows is {rows!r}; it must be an integer of at least 1")
    if slots is not None and len(slots) != rows:
        raise InvalidCountError(f"{len(slots)} slots are given for {rows} rows; there must be one per row")
    chosen = None if slots is None else tuple(slots)
    layers = [_RowCache(cache, chosen) for cache in leaves(caches)]
    return SpeculativeTransaction(layers, partial(_keep_of, rows))


class _RowCache:
    """One batched cache, or the slots of many layers."""

    __slots__ = ("_begin", "_cache", "_calls", "_fits")

    def __init__(self, cache: object, slots: tuple[int, ...] | None) -> None:
        self._cache = cache
        self._calls = calls = RoundCalls(cache)
        if not calls.trio:
            raise IncompleteRoundError(
                f"a {type(cache).__name__} has no calls of a round, so its rows cannot keep different numbers of "
                f"drafts; use Headrace's batches"
            )
        fits = calls.fits
        self._fits: Callable[[int], object] | None = (
            fits if fits is None or slots is None else partial(fits, slots=slots)
        )
        self._begin = calls.begin if slots is None else partial(calls.begin, slots=slots)

    @property
    def is_open(self) -> bool | None:
        return is_in_round(self._cache)

    def fits(self, drafts: int) -> bool:
        return self._fits is None or bool(self._fits(drafts))

    def begin(self, drafts: int) -> None:
        if drafts:
            self._begin()

    def resolve(self, keep: Keep, drafts: int) -> None:
        if not drafts:
            return
        if keep is None:
            self._calls.commit()
        else:
            self._calls.rollback(keep)


def _keep_of(rows: int, accepted: Sequence[int], drafts: int) -> Keep:
    is_list = type(accepted) is list or (isinstance(accepted, Sequence) and not isinstance(accepted, str))  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_list or len(accepted) != rows:
        raise InvalidCountError(f"accepted is {accepted!r}; it must be a sequence of {rows} numbers, one per row")
    for row, count in enumerate(accepted):
        if type(count) is not int or not 0 <= count <= drafts:
            raise InvalidCountError(
                f"accepted[{row}] is {count!r}; it must be an integer from 0 to the round's {drafts} drafts, or the "
                f"caches must be discarded"
            )
    fewest = min(accepted)
    if fewest == drafts:
        return None
    return fewest + 1 if fewest == max(accepted) else [count + 1 for count in accepted]
