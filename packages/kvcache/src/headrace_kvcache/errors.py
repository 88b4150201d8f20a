"""Errors of the kvcache package.

KVCacheError(Exception)
├── SlotsExhausted    caller: every slot of the batch is taken (RuntimeError)
├── InvalidSlots      caller: slots that are not joined, out of range or not ascending (ValueError)
├── InvalidLength     caller: a number of tokens outside its range (ValueError)
├── InvalidGeometry   caller: sizes, counts or element types that cannot describe or fit a cache (ValueError)
├── NotTrimmable      caller: what earlier positions need is gone (RuntimeError)
├── UnsupportedCache  caller: a cache of a kind that Headrace has no twin for (TypeError)
├── EmptyCache        caller: attention over positions that the cache does not hold (RuntimeError)
└── IntegrityError    defect: the books of a cache and its buffers disagree (RuntimeError)

A refused operation changes nothing.
"""


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


class EmptyCache(KVCacheError, RuntimeError):
    """The queries stand at positions that the cache does not hold."""


class NotTrimmable(KVCacheError, RuntimeError):
    """Positions cannot be forgotten, because what earlier ones need is overwritten or summed up."""


class UnsupportedCache(KVCacheError, TypeError):
    """A cache of a kind that this package does not know."""


class IntegrityError(KVCacheError, RuntimeError):
    """The books of a cache and its buffers disagree; the cache must be discarded."""
