"""Rounds of speculation over single-row caches, of this package or of another: `bind_cache_rollback`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace_kvcache.errors import IncompleteRoundError, InvalidCountError, RoundRefusedError
from headrace_kvcache.speculative_transaction import SpeculativeTransaction
from headrace_kvcache.trims import is_falsely_trimmable, lost_front, may_lose_front, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headrace_kvcache.speculative_transaction import Keep, RoundLayer

_TRIO = ("spec_round_begin", "spec_round_commit", "spec_round_rollback")


def bind_cache_rollback(caches: Sequence[object]) -> SpeculativeTransaction[int]:
    """Bind the caches of one row to rounds of speculation; an acceptance is how many of the drafts were accepted.

    Whether a cache can take drafts back is asked before every round: of the cache itself if it declares
    `spec_round_fits`, as every cache of this package does; of a foreign ring by its `max_size`, which the round must
    stay below; else it must have the calls of a round or be trimmable. A list of caches is asked part by part.

    Args:
        caches: one per layer: of this package or by mlx-lm's protocol.

    Raises:
        IncompleteRoundError: a cache has a part of `spec_round_begin`, `spec_round_commit`, `spec_round_rollback`.
    """
    return SpeculativeTransaction([_scalar_layer(cache) for cache in leaves(caches)], _keep_of)


def leaves(caches: Sequence[object]) -> Iterator[object]:
    """Yield the caches, and in the place of lists of caches their parts."""
    for cache in caches:
        parts = parts_of(cache)
        if parts is None:
            yield cache
        else:
            yield from leaves(parts)


class RoundCalls:
    """The calls of a round that a cache offers, looked up once.

    Attributes:
        fits: `spec_round_fits`; None if the cache does not declare it.
        trio: whether the cache has the other three.
        begin: `spec_round_begin`.
        commit: `spec_round_commit`.
        rollback: `spec_round_rollback`.

    Raises:
        IncompleteRoundError: some of the trio are there, and some are not.
    """

    __slots__ = ("begin", "commit", "fits", "rollback", "trio")

    def __init__(self, cache: object) -> None:
        found = {name: getattr(cache, name) for name in _TRIO if callable(getattr(cache, name, None))}
        if found and len(found) < len(_TRIO):
            missing = ", ".join(name for name in _TRIO if name not in found)
            raise IncompleteRoundError(f"a {type(cache).__name__} has {', '.join(found)}, but not {missing}")
        fits: Any = getattr(cache, "spec_round_fits", None)
        self.fits: Callable[..., Any] | None = fits if callable(fits) else None
        self.trio = bool(found)
        self.begin: Callable[..., object] = found.get(_TRIO[0], _no_call)
        self.commit: Callable[..., object] = found.get(_TRIO[1], _no_call)
        self.rollback: Callable[..., object] = found.get(_TRIO[2], _no_call)


def _no_call(*_: object, **__: object) -> object:
    raise RoundRefusedError("the cache has no rounds")  # pragma: no cover


def is_in_round(cache: object) -> bool | None:
    """Return whether a cache says that it is in a round; None if it does not say."""
    said = getattr(cache, "is_in_round", None)
    return said if type(said) is bool else None


def _scalar_layer(cache: object) -> RoundLayer:
    calls = RoundCalls(cache)
    return _RoundCache(cache, calls) if calls.trio else _TrimmedCache(cache, calls)


class _RoundCache:
    """A cache that keeps what a round needs."""

    __slots__ = ("_cache", "_calls", "_max_size")

    def __init__(self, cache: object, calls: RoundCalls) -> None:
        self._cache: Any = cache
        self._calls = calls
        self._max_size = _max_size(cache)

    @property
    def is_open(self) -> bool | None:
        return is_in_round(self._cache)

    def fits(self, drafts: int) -> bool:
        if self._calls.fits is not None:
            return bool(self._calls.fits(drafts))
        return self._max_size is None or _stays_below(self._cache.offset, drafts, self._max_size)

    def begin(self, drafts: int) -> None:
        del drafts
        self._calls.begin()

    def resolve(self, keep: Keep, drafts: int) -> None:
        del drafts
        if keep is None:
            self._calls.commit()
        else:
            self._calls.rollback(keep)


class _TrimmedCache:
    """A cache that forgets its last positions, as mlx-lm's do; a ring of theirs until its wrap."""

    __slots__ = ("_cache", "_declared", "_max_size")

    def __init__(self, cache: object, calls: RoundCalls) -> None:
        self._cache: Any = cache
        self._declared = calls.fits
        self._max_size = _max_size(cache)

    @property
    def is_open(self) -> bool | None:
        return None

    def fits(self, drafts: int) -> bool:
        if self._declared is not None:
            return bool(self._declared(drafts))
        if self._max_size is not None:
            return _stays_below(self._cache.offset, drafts, self._max_size)
        is_trimmable = getattr(self._cache, "is_trimmable", None)
        if not callable(is_trimmable) or not is_trimmable():
            return False
        return not is_falsely_trimmable(self._cache) and not may_lose_front(self._cache, drafts)

    def begin(self, drafts: int) -> None:
        """Nothing is kept: what is rejected is trimmed."""

    def resolve(self, keep: Keep, drafts: int) -> None:
        if keep is None:
            return
        assert isinstance(keep, int), "a cache of one row keeps one number"
        rejected = drafts + 1 - keep
        trimmed = self._cache.trim(rejected)
        if (type(trimmed) is int and trimmed != rejected) or lost_front(self._cache):
            raise RoundRefusedError(
                f"a {type(self._cache).__name__} was to forget {rejected} rejected positions, forgot {trimmed} and may "
                f"lack what earlier ones see; decode such caches without drafts"
            )


def _max_size(cache: object) -> int | None:
    size: object = getattr(cache, "max_size", None)
    return size if type(size) is int else None


def _stays_below(offset: object, drafts: int, max_size: int) -> bool:
    # The pending token and the drafts must not reach the wrap: what they would overwrite is gone.
    return type(offset) is int and offset + drafts + 1 < max_size


def _keep_of(accepted: int, drafts: int) -> Keep:
    if type(accepted) is not int or not 0 <= accepted <= drafts:
        raise InvalidCountError(
            f"accepted is {accepted!r}; it must be an integer from 0 to the round's {drafts} drafts, or the caches "
            f"must be discarded"
        )
    return accepted + 1 if accepted < drafts else None
