"""Several caches that one layer owns."""

from __future__ import annotations

from typing import Protocol, Self, TypeAlias

from headrace_kvcache.chunked import ChunkedKVCache
from headrace_kvcache.errors import NotTrimmable, UnsupportedCache
from headrace_kvcache.merging import Mergeable
from headrace_kvcache.plain import KVCache
from headrace_kvcache.quantized import QuantizedKVCache
from headrace_kvcache.recurrent import RecurrentCache
from headrace_kvcache.rotating import RotatingKVCache, RotatingQuantizedKVCache
from headrace_kvcache.stored import check_count
from headrace_kvcache.turbo_cache import TurboQuantKVCache

State: TypeAlias = "list[tuple[object, str]]"


class LayerCache(Protocol):
    """What every cache of one layer offers, whatever it holds."""

    @property
    def state(self) -> object: ...

    @property
    def nbytes(self) -> int: ...

    def is_trimmable(self) -> bool: ...

    def trim(self, num_tokens: int) -> int: ...

    def size(self) -> int: ...

    def empty(self) -> bool: ...

    def check_integrity(self) -> None: ...


class CacheList(Mergeable):
    """The caches of one layer, by index: all are trimmed, or none.

    Args:
        *caches: at least one.
    """

    def __init__(self, *caches: LayerCache) -> None:
        self.caches = caches

    def __getitem__(self, index: int) -> LayerCache:
        return self.caches[index]

    def is_trimmable(self) -> bool:
        """Return whether every cache is trimmable."""
        return all(cache.is_trimmable() for cache in self.caches)

    def trim(self, num_tokens: int) -> int:
        """Forget the last `num_tokens` positions in every cache and return how many were forgotten.

        Raises:
            InvalidLength: a negative number, or not an integer.
            NotTrimmable: a cache is not trimmable; none was changed.
        """
        check_count(num_tokens)
        if num_tokens and not self.is_trimmable():
            kinds = ", ".join(type(cache).__name__ for cache in self.caches if not cache.is_trimmable())
            raise NotTrimmable(f"{kinds} of this layer cannot be trimmed by {num_tokens}; ask is_trimmable() first")
        return max(cache.trim(num_tokens) for cache in self.caches)

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
    def state(self) -> State:
        """Each cache's state and class name."""
        return [(cache.state, type(cache).__name__) for cache in self.caches]

    @state.setter
    def state(self, state: State) -> None:
        self.caches = tuple(cache_from_state(name, part) for part, name in state)

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Make a list from another one's `state`.

        Raises:
            UnsupportedCache: a class that this package does not have.
        """
        cache = cls()
        cache.state = state
        return cache


_MAKERS = {
    "CacheList": CacheList.from_state,
    "ChunkedKVCache": ChunkedKVCache.from_state,
    "KVCache": KVCache.from_state,
    "QuantizedKVCache": QuantizedKVCache.from_state,
    "RecurrentCache": RecurrentCache.from_state,
    "RotatingKVCache": RotatingKVCache.from_state,
    "RotatingQuantizedKVCache": RotatingQuantizedKVCache.from_state,
    "TurboQuantKVCache": TurboQuantKVCache.from_state,
}


def cache_from_state(name: str, state: object) -> LayerCache:
    """Make the cache of a class, by its name, from its state.

    Raises:
        UnsupportedCache: a class that this package does not have.
    """
    maker = _MAKERS.get(name)
    if maker is None:
        raise UnsupportedCache(f"there is no cache class {name!r}; it must be one of {', '.join(sorted(_MAKERS))}")
    return maker(state)  # pyright: ignore[reportArgumentType]
