"""A cache that is stored as it comes until its first chunk is in, and quantized from the next append on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_kvcache.conversion import check_heads, converted

if TYPE_CHECKING:
    import mlx.core as mx

    from headrace_kvcache.masks import Mask
    from headrace_kvcache.plain import KVCache
    from headrace_kvcache.rotating import RotatingKVCache
    from headrace_kvcache.spec import Packing
    from headrace_kvcache.stored import Side, StoredCache


class ConvertingCache:
    """Stands for a plain or rotating cache and converts it by itself, for callers that know of no scheme.

    The conversion comes right before the append that follows the first one at or beyond `start`, a layer at a time
    in the course of a forward. Everything else goes to the cache of the moment.

    Args:
        cache: the cache to begin with.
        packing: the form to convert it to.
        start: least number of positions before it is converted.

    Attributes:
        packing: the form that it is converted to.
    """

    step = 256

    def __init__(self, cache: KVCache | RotatingKVCache, packing: Packing, *, start: int = 0) -> None:
        self.packing = packing
        self._cache: StoredCache = cache
        self._packing: Packing | None = packing
        self._start = max(start, 1)

    @property
    def cache(self) -> StoredCache:
        """The cache of the moment."""
        return self._cache

    def convert(self) -> bool:
        """Convert now if it is due and not done, and return whether it was; never in a round, which may go back."""
        packing = self._packing
        if packing is None or self._cache.offset < self._start or self._cache.is_in_round:
            return False
        self._cache, self._packing = converted(self._cache, packing), None
        return True

    def _prepare(self, keys: mx.array, values: mx.array) -> None:
        if self._packing is not None and self._cache.empty():
            check_heads(self._packing, keys, values)
        self.convert()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append and return what queries at these positions may see.

        Raises:
            InvalidScheme: the head sizes do not fit the form; raised before the first append.
            InvalidGeometry: other rows, heads, sizes or dtypes than before.
        """
        self._prepare(keys, values)
        return self._cache.update_and_fetch(keys, values)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array | None,
        values: mx.array | None,
        *,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """Append and attend, see `attend`."""
        if keys is not None and values is not None:
            self._prepare(keys, values)
        return self._cache.attend(queries, keys, values, scale=scale, window=window, sinks=sinks, softcap=softcap)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what the last append returned."""
        return self._cache.keys_and_values()

    def make_mask(self, num_tokens: int, *, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Return the mask that mlx-lm's models ask for before they append `num_tokens` positions."""
        return self._cache.make_mask(num_tokens, return_array=return_array, window_size=window_size)

    def trim(self, num_tokens: int) -> int:
        """Forget the last `num_tokens` positions, at most all, and return how many were forgotten."""
        return self._cache.trim(num_tokens)

    def is_trimmable(self) -> bool:
        """Return whether any number of positions can be forgotten now."""
        return self._cache.is_trimmable()

    @property
    def is_in_round(self) -> bool:
        """Whether a round of speculation is open."""
        return self._cache.is_in_round

    def spec_round_fits(self, drafts: int) -> bool:
        """Return whether a round of that many drafts can be rolled back, see `StoredCache.spec_round_fits`."""
        return self._cache.spec_round_fits(drafts)

    def spec_round_begin(self) -> None:
        """Convert if that is due, then open a round, see `StoredCache.spec_round_begin`."""
        self.convert()
        self._cache.spec_round_begin()

    def spec_round_commit(self) -> None:
        """Keep everything that was appended since `spec_round_begin`."""
        self._cache.spec_round_commit()

    def spec_round_rollback(self, keep: int) -> None:
        """Keep the first `keep` positions that were appended since `spec_round_begin`."""
        self._cache.spec_round_rollback(keep)

    def check_integrity(self) -> None:
        """Check the cache of the moment, see `StoredCache.check_integrity`."""
        self._cache.check_integrity()

    def size(self) -> int:
        """Return the number of positions held."""
        return self._cache.size()

    def empty(self) -> bool:
        """Return whether nothing was ever appended."""
        return self._cache.empty()

    @property
    def offset(self) -> int:
        """Number of positions appended and not trimmed."""
        return self._cache.offset

    @property
    def keys(self) -> Side:
        """The buffer of the keys, in the form of the moment."""
        return self._cache.keys

    @keys.setter
    def keys(self, keys: Side) -> None:
        self._cache.keys = keys

    @property
    def values(self) -> Side:
        """The buffer of the values, in the form of the moment."""
        return self._cache.values

    @values.setter
    def values(self, values: Side) -> None:
        self._cache.values = values

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers allocated now."""
        return self._cache.nbytes

    @property
    def state(self) -> object:
        """State of the cache of the moment."""
        return self._cache.state
