"""The single-row cache of chunked attention (Llama 4): a position sees its own chunk up to itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, TypeAlias

import mlx.core as mx

from headrace_kvcache.errors import EmptyCache, InvalidGeometry, NotTrimmable
from headrace_kvcache.fields import SLAB, part, slabs, with_room, write
from headrace_kvcache.forms import PlainForm
from headrace_kvcache.stored import StoredCache, check_count

if TYPE_CHECKING:
    from headrace_kvcache.forms import Fields
    from headrace_kvcache.masks import Mask
    from headrace_kvcache.stored import Side

State: TypeAlias = "tuple[Side, Side, int, int, int]"


class ChunkedKVCache(StoredCache):
    """Holds the positions from `start_position` on, in the slabs of 256 that cover them.

    mlx-lm's model calls `maybe_trim_front` before each forward; `attend` does it itself.

    Args:
        chunk_size: positions of a chunk.

    Attributes:
        offset: number of positions appended and not trimmed.
        start_position: the first position held.

    Raises:
        InvalidGeometry: a chunk size that is not an integer of at least 1.
    """

    def __init__(self, chunk_size: int) -> None:
        if type(chunk_size) is not int or chunk_size < 1:
            raise InvalidGeometry(f"chunk_size is {chunk_size!r}; it must be an integer of at least 1")
        super().__init__(PlainForm())
        self.chunk_size = chunk_size
        self.start_position = 0
        self._first = 0

    def maybe_trim_front(self) -> None:
        """Forget the oldest positions, so that at most `chunk_size` are held; a round's own are held besides."""
        settled = self._round.started()[0] if self._round.is_open else self.offset
        self.start_position = max(self.start_position, settled - self.chunk_size)
        first = self.start_position // SLAB * SLAB
        if self._fields is not None and first > self._first:
            self._fields = part(self._fields, first - self._first, self._fields[0].shape[2])
            self._first = first

    def _append(self, added: Fields, num_tokens: int) -> None:
        end, first = self.offset + num_tokens, self._first
        used = self.offset - first
        fields = with_room(self._fields, added, used=used, end=end - first, capacity=slabs(end) - first)
        write(fields, added, used)
        self._fields, self.offset = fields, end

    def _held(self) -> Fields:
        if self._fields is None:
            raise EmptyCache("the cache holds nothing yet; append keys and values first")
        return self._columns(self.start_position)

    def _columns(self, start: int) -> Fields:
        assert self._fields is not None
        return part(self._fields, start - self._first, self.offset - self._first)

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
        if keys is not None:
            self.maybe_trim_front()
        return super().attend(queries, keys, values, scale=scale, window=window, sinks=sinks, softcap=softcap)

    def _seen(self, num_tokens: int, window: int | None) -> tuple[Fields, Mask]:
        start = self.offset - num_tokens
        first = max(self.start_position, start // self.chunk_size * self.chunk_size)
        if window is None and start // self.chunk_size == (self.offset - 1) // self.chunk_size:
            return self._columns(first), None if num_tokens == 1 else "causal"
        return self._columns(first), self._mask_array(start, num_tokens, first, window)

    def make_mask(self, num_tokens: int, *, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Return the mask over what an append of `num_tokens` positions will return: the same chunk, up to itself."""
        del return_array
        return self._mask_array(self.offset, num_tokens, self.start_position, window_size)

    def _mask_array(self, start: int, num_tokens: int, first: int, window: int | None) -> mx.array:
        columns = mx.arange(first, start + num_tokens)
        positions = mx.arange(start, start + num_tokens)[:, None]
        mask = (columns <= positions) & (columns // self.chunk_size == positions // self.chunk_size)
        return mask if window is None else mask & (columns > positions - window)

    def trim(self, num_tokens: int) -> int:
        """Forget the last `num_tokens` positions, at most those held, and return how many were forgotten.

        Raises:
            InvalidLength: a negative number, or not an integer.
            NotTrimmable: the chunk that would then be the last one is no longer held from its start.
        """
        check_count(num_tokens)
        trimmed = min(self.offset, num_tokens)
        end = self.offset - trimmed
        if trimmed and self.start_position > end // self.chunk_size * self.chunk_size:
            raise NotTrimmable(
                f"positions from {self.start_position} on are held, so the cache cannot be trimmed to {end}: that "
                f"chunk of {self.chunk_size} is no longer whole; ask is_trimmable() first"
            )
        self.offset = end
        return trimmed

    def is_trimmable(self) -> bool:
        """Return whether everything is still held, so that any number of positions can be forgotten."""
        return self.start_position == 0

    def _forget_from(self, end: int) -> None:
        self.offset = end

    def _num_stored(self) -> int:
        return self.offset - self._first

    def _num_whole(self) -> int:
        return self.offset - -(-self.start_position // self.chunk_size) * self.chunk_size

    def size(self) -> int:
        """Return the number of positions held."""
        return self.offset - self.start_position

    @property
    def state(self) -> State:
        """Buffers of the positions held, offset, chunk size and first position, in array objects of their own."""
        if self._fields is None:
            return None, None, self.offset, self.chunk_size, self.start_position
        keys, values = self._held()
        return keys, values, self.offset, self.chunk_size, self.start_position

    @state.setter
    def state(self, state: State) -> None:
        keys, values, self.offset, self.chunk_size, self.start_position = state
        self._first = self.start_position
        self._set_sides(keys, values)

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Make a cache from another one's `state`; the two share bytes until one of them is written."""
        cache = cls(state[3])
        cache.state = state
        return cache
