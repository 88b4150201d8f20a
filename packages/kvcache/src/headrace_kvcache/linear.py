"""A cache in which position p lies in column p."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_kvcache.errors import EmptyCache
from headrace_kvcache.fields import part, slabs, with_room, write
from headrace_kvcache.masks import Mask, causal_mask
from headrace_kvcache.stored import StoredCache, check_count

if TYPE_CHECKING:
    from headrace_kvcache.forms import Fields


class LinearCache(StoredCache):
    """Every position is kept, in slabs of 256; positions beyond `offset` are stale and never read.

    The buffers hold ceil(offset / 256) slabs after an append, whatever the sizes of the appends were.
    """

    def _append(self, added: Fields, num_tokens: int) -> None:
        end = self.offset + num_tokens
        fields = with_room(self._fields, added, used=self.offset, end=end, capacity=slabs(end))
        write(fields, added, self.offset)
        self._fields, self.offset = fields, end

    def _held(self) -> Fields:
        if self._fields is None:
            raise EmptyCache("the cache holds nothing yet; append keys and values first")
        return part(self._fields, 0, self.offset)

    def _seen(self, num_tokens: int, window: int | None) -> tuple[Fields, Mask]:
        if self._fields is None:
            raise EmptyCache("the cache holds nothing yet; append keys and values first")
        start = self.offset - num_tokens
        first = 0 if window is None else max(0, start + 1 - window)
        return part(self._fields, first, self.offset), _mask(start, num_tokens, first=first, window=window)

    def make_mask(self, num_tokens: int, *, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Return the mask that mlx-lm's models ask for before they append `num_tokens` positions."""
        if window_size is None and not return_array:
            return None if num_tokens == 1 else "causal"
        if num_tokens == 1 and window_size is None:
            return None
        return _mask_array(self.offset, num_tokens, first=0, window=window_size)

    def trim(self, num_tokens: int) -> int:
        """Forget the last `num_tokens` positions, at most all, and return how many were forgotten."""
        check_count(num_tokens)
        trimmed = min(self.offset, num_tokens)
        self.offset -= trimmed
        return trimmed

    def is_trimmable(self) -> bool:
        """Return True: positions can always be forgotten."""
        return True

    def _forget_from(self, end: int) -> None:
        self.offset = end


def _mask(start: int, num_tokens: int, *, first: int, window: int | None) -> Mask:
    if num_tokens == 1:
        return None
    if window is None or start + num_tokens <= window:
        return "causal"
    return _mask_array(start, num_tokens, first=first, window=window)


def _mask_array(start: int, num_tokens: int, *, first: int, window: int | None) -> mx.array:
    positions = mx.arange(start, start + num_tokens)[:, None]
    return causal_mask(positions, range(first, start + num_tokens), window=window)
