"""Errors of the kvcache package.

KVCacheError(Exception)
├── SlotsExhausted    caller: every slot of the batch is taken (RuntimeError)
├── InvalidSlots      caller: slots that are not joined, out of range or not ascending (ValueError)
├── InvalidLength     caller: a number of tokens outside its range (ValueError)
├── InvalidGeometry   caller: sizes, counts or element types that cannot describe or fit a cache (ValueError)
├── InvalidScheme     caller: a KV scheme that does not exist or does not fit the model (ValueError)
├── InvalidPrefix     caller: tokens that cannot be a key, or that caches do not hold (ValueError)
├── NotTrimmable      caller: what earlier positions need is gone (RuntimeError)
├── UnsupportedCache  caller: a cache of a kind that Headrace has no twin for (TypeError)
├── BudgetExceeded    caller: bytes that do not fit the budget, now or ever (RuntimeError)
├── CacheFileError    caller: a file that is no cache file, or not the one that was written (ValueError)
├── EmptyCache        caller: attention over positions that the cache does not hold (RuntimeError)
├── IncompleteRoundError caller: a cache with a part of the calls of a round, or none where it needs them (TypeError)
├── InvalidCountError caller: a number of drafts or kept positions outside its range (ValueError)
├── RoundRefusedError caller: a round of speculation that cannot begin or be rolled back (RuntimeError)
├── StateInvalidError fault: a layer failed in the middle of a round, so its caches must be discarded (RuntimeError)
└── IntegrityError    defect: the books of a cache and its buffers disagree (RuntimeError)

A refused operation changes nothing.
"""

from typing import Literal, TypeAlias

CacheFileReason: TypeAlias = Literal["foreign", "version", "unchecked", "damaged", "unsupported", "too-large"]


class KVCacheError(Exception):
    """Base of every error that this package raises on purpose."""


class SlotsExhausted(KVCacheError, RuntimeError):
    """No slot is free.

    Attributes:
        max_rows: how many slots the batch has.
    """

    def __init__(self, max_rows: int) -> None:
        super().__init__(f"all {max_rows} slots are taken; leave() a row first or make the batch with more rows")
        self.max_rows = max_rows

    def __reduce__(self) -> tuple[type["SlotsExhausted"], tuple[int]]:
        return type(self), (self.max_rows,)


class InvalidSlots(KVCacheError, ValueError):
    """Slots that are not joined, out of range, repeated or not in ascending order."""


class InvalidLength(KVCacheError, ValueError):
    """A number of tokens that is not an integer or lies outside its range."""


class InvalidGeometry(KVCacheError, ValueError):
    """Array shapes, element types or counts that do not fit the cache."""


class BudgetExceeded(KVCacheError, RuntimeError):
    """Bytes that do not fit the budget.

    Attributes:
        num_bytes: what was asked for.
        free_bytes: what there was.
        can_wait: whether it can fit once others have given theirs back.
    """

    def __init__(self, num_bytes: int, free_bytes: int, *, can_wait: bool) -> None:
        remedy = "wait until other rows end" if can_wait else "shorten the prompt, lower max_tokens or raise the budget"
        super().__init__(f"{num_bytes} bytes of KV cache do not fit the {free_bytes} that are there; {remedy}")
        self.num_bytes = num_bytes
        self.free_bytes = free_bytes
        self.can_wait = can_wait

    def __reduce__(self) -> tuple[object, ...]:
        return _budget_exceeded, (self.num_bytes, self.free_bytes, self.can_wait)


def _budget_exceeded(num_bytes: int, free_bytes: int, can_wait: bool) -> BudgetExceeded:
    return BudgetExceeded(num_bytes, free_bytes, can_wait=can_wait)


class CacheFileError(KVCacheError, ValueError):
    """A file that holds no caches, or other bytes than were written; or something that cannot be stored in one.

    Attributes:
        reason: "foreign" (no cache file), "version" (of another format), "unchecked" (without a checksum), "damaged",
            "unsupported" (caches or metadata of a kind that is not stored) or "too-large".
    """

    def __init__(self, message: str, reason: CacheFileReason) -> None:
        super().__init__(message)
        self.reason: CacheFileReason = reason

    def __reduce__(self) -> tuple[type["CacheFileError"], tuple[str, CacheFileReason]]:
        return type(self), (str(self), self.reason)


class EmptyCache(KVCacheError, RuntimeError):
    """The queries stand at positions that the cache does not hold."""


class InvalidScheme(KVCacheError, ValueError):
    """A KV scheme that does not exist, or that some layer of the model can never be stored in.

    Attributes:
        layer: the index of that layer; None if the scheme itself is wrong.
    """

    def __init__(self, message: str, layer: int | None = None) -> None:
        super().__init__(message)
        self.layer = layer

    def __reduce__(self) -> tuple[type["InvalidScheme"], tuple[str, int | None]]:
        return type(self), (str(self), self.layer)


class InvalidPrefix(KVCacheError, ValueError):
    """Tokens that cannot be the key of stored caches: not integers, or not exactly what the caches hold.

    Attributes:
        layer: the index of the first cache that holds something else; None if it is not one layer's fault.
    """

    def __init__(self, message: str, layer: int | None = None) -> None:
        super().__init__(message)
        self.layer = layer

    def __reduce__(self) -> tuple[type["InvalidPrefix"], tuple[str, int | None]]:
        return type(self), (str(self), self.layer)


class NotTrimmable(KVCacheError, RuntimeError):
    """Positions cannot be forgotten, because what earlier ones need is overwritten or summed up."""


class UnsupportedCache(KVCacheError, TypeError):
    """A cache of a kind that this package does not know."""


class IntegrityError(KVCacheError, RuntimeError):
    """The books of a cache and its buffers disagree; the cache must be discarded."""


class IncompleteRoundError(KVCacheError, TypeError):
    """A cache has some of `spec_round_begin`, `spec_round_commit` and `spec_round_rollback`, or none but needs them."""


class StateInvalidError(KVCacheError, RuntimeError):
    """A layer failed in the middle of a round: the caches disagree for ever and must be discarded."""


class RoundRefusedError(KVCacheError, RuntimeError):
    """A round of speculation cannot begin, end or be rolled back as the caches stand."""


class InvalidCountError(KVCacheError, ValueError):
    """A number of drafts, or of positions to keep, that is not an integer or lies outside its range."""
