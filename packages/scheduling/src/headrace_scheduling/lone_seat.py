"""One row on single-row caches, behind the calls of a batch of slots: for caches that cannot share any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace_kvcache import clone_caches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class LoneSeat:
    """A batch of one row.

    Args:
        make_caches: makes fresh caches for one row, one per layer.
    """

    def __init__(self, make_caches: Callable[[], list[Any]]) -> None:
        self._make_caches = make_caches
        self._caches: list[Any] | None = None
        self._end = 0

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._caches or ())

    def join(self, *, num_tokens: int = 0) -> int:
        """Seat an empty row.

        Raises:
            RuntimeError: a row is seated.
        """
        del num_tokens
        return self._take(self._make_caches(), 0)

    def join_caches(self, caches: Sequence[object], *, num_tokens: int = 0) -> int:
        """Seat a row that goes on from caches, which stay as they are."""
        del num_tokens
        clones: list[Any] = clone_caches(caches)
        return self._take(clones, max(getattr(cache, "offset", 0) for cache in clones))

    def _take(self, caches: list[Any], end: int) -> int:
        if self._caches is not None:
            raise RuntimeError("the one seat is taken; such rows run alone")
        self._caches, self._end = caches, end
        return 0

    def leave(self, slot: int) -> None:
        """Drop the row."""
        del slot
        self._caches = None

    def end(self, slot: int) -> int:
        """Return the number of positions that the row holds."""
        del slot
        return self._end

    def view(self, slots: Sequence[int], num_tokens: int, *, lengths: Sequence[int] | None = None) -> list[Any]:
        """Return the row's caches."""
        del slots, num_tokens, lengths
        assert self._caches is not None, "a view is asked of an empty seat"
        return self._caches

    def advance(self, slots: Sequence[int], num_tokens: int | Sequence[int]) -> None:
        """Count what the last forward appended."""
        del slots
        self._end += num_tokens if isinstance(num_tokens, int) else num_tokens[0]

    def extract(self, slot: int, *, first: int = 0) -> list[Any]:
        """Return clones of the row's caches.

        Raises:
            RuntimeError: `first` is not 0.
        """
        del slot
        if first:
            raise RuntimeError(f"the one seat's caches are copied whole, and {first} positions are to be left out")
        return clone_caches(self._caches or ())

    def convert(self, slot: int) -> None:
        """Do nothing: such caches convert themselves."""
        del slot
