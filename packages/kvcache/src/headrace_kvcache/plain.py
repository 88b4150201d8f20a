"""The single-row cache: plain attention, mlx-lm's protocol."""

from __future__ import annotations

from typing import Self, TypeAlias

import mlx.core as mx

from headrace_kvcache.attention import Mask, causal_mask, masked_attention
from headrace_kvcache.errors import EmptyCache, InvalidGeometry, InvalidLength
from headrace_kvcache.geometry import check_appended, check_fits

SLAB = 256

State: TypeAlias = tuple[mx.array | None, mx.array | None, int]


class KVCache:
    """Keys and values of one layer, appended in place into slabs of 256 positions.

    It speaks mlx-lm's cache protocol, so that mlx-lm generates with it, and offers `attend` to models that leave
    masks to the cache. Positions beyond `offset` are stale and never read. The buffers hold ceil(offset / 256)
    slabs after an append, whatever the sizes of the appends were.

    Attributes:
        offset: number of positions held, the same for every row of the arrays.
        keys: `(B, H, C, D)`, or None while nothing was appended.
        values: `(B, H, C, Dv)`, or None while nothing was appended.
    """

    step = SLAB

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `keys (B, H, T, D)` and `values (B, H, T, Dv)` and return everything held.

        The returned arrays are views: drop them before the next append, or that append copies the buffers.

        Raises:
            InvalidGeometry: other rows, heads, sizes or dtypes than before.
        """
        start, end = self.offset, self.offset + keys.shape[2]
        new_keys = _with_room(self.keys, keys, start, end, "keys")
        new_values = _with_room(self.values, values, start, end, "values")
        new_keys[..., start:end, :] = keys
        new_values[..., start:end, :] = values
        self.keys, self.values, self.offset = new_keys, new_values, end
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return views of the positions held, `(B, H, offset, D)` and `(B, H, offset, Dv)`.

        Raises:
            EmptyCache: nothing was appended yet.
        """
        if self.keys is None or self.values is None:
            raise EmptyCache("the cache holds nothing yet; append keys and values first")
        if self.offset == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[..., : self.offset, :], self.values[..., : self.offset, :]

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
            check_appended(queries, keys, values)
            held_keys, held_values = self.update_and_fetch(keys, values)
        elif keys is not None or values is not None:
            raise InvalidGeometry("keys and values must be given together, or both be None to attend without appending")
        else:
            held_keys, held_values = self.keys_and_values()
        num_tokens, end = queries.shape[2], self.offset
        if num_tokens > end:
            raise EmptyCache(f"{num_tokens} queries without keys need as many held positions; the cache holds {end}")
        first = 0 if window is None else max(0, end - num_tokens + 1 - window)
        if first:
            held_keys, held_values = held_keys[..., first:, :], held_values[..., first:, :]
        mask = _mask(end - num_tokens, num_tokens, first=first, window=window)
        return masked_attention(queries, held_keys, held_values, scale=scale, mask=mask, sinks=sinks, softcap=softcap)

    def make_mask(self, num_tokens: int, *, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Return the mask that mlx-lm's models ask for before they append `num_tokens` positions.

        Returns:
            None if nothing is masked, `"causal"`, or a boolean `(num_tokens, offset + num_tokens)`.
        """
        if window_size is None and not return_array:
            return None if num_tokens == 1 else "causal"
        if num_tokens == 1 and window_size is None:
            return None
        return _mask_array(self.offset, num_tokens, first=0, window=window_size)

    def trim(self, num_tokens: int) -> int:
        """Forget the last `num_tokens` positions, at most all, and return how many were forgotten.

        Raises:
            InvalidLength: a negative number, or not an integer.
        """
        if type(num_tokens) is not int or num_tokens < 0:
            raise InvalidLength(f"num_tokens is {num_tokens!r}; it must be an integer of at least 0")
        trimmed = min(self.offset, num_tokens)
        self.offset -= trimmed
        return trimmed

    def is_trimmable(self) -> bool:
        """Return True: positions can always be forgotten."""
        return True

    def size(self) -> int:
        """Return the number of positions held."""
        return self.offset

    def empty(self) -> bool:
        """Return whether nothing was ever appended."""
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers allocated now."""
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes

    @property
    def state(self) -> State:
        """Buffers and offset, to be evaluated or saved; keeping them makes the next append copy."""
        return self.keys, self.values, self.offset

    @state.setter
    def state(self, state: State) -> None:
        self.keys, self.values, self.offset = state

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Make a cache from another one's `state`; the two share buffers until one of them is written."""
        cache = cls()
        keys, values, offset = state
        # New array objects: a slice write changes an array object in place for all of its holders.
        cache.state = (
            None if keys is None else mx.array(keys),
            None if values is None else mx.array(values),
            offset,
        )
        return cache


def _with_room(buffer: mx.array | None, added: mx.array, start: int, end: int, name: str) -> mx.array:
    batch, num_heads, _, head_dim = added.shape
    capacity = -(-end // SLAB) * SLAB
    if buffer is None:
        return mx.zeros((batch, num_heads, capacity, head_dim), added.dtype)
    check_fits(buffer, added, name)
    if buffer.shape[0] != batch:
        raise InvalidGeometry(f"{name} have {batch} rows; this cache holds {buffer.shape[0]}")
    if buffer.shape[2] >= end:
        return buffer
    fresh = mx.zeros((batch, num_heads, capacity - start, head_dim), added.dtype)
    return mx.concatenate([buffer[..., :start, :], fresh], axis=2)


def _mask(start: int, num_tokens: int, *, first: int, window: int | None) -> Mask:
    if num_tokens == 1:
        return None
    if window is None or start + num_tokens <= window:
        return "causal"
    return _mask_array(start, num_tokens, first=first, window=window)


def _mask_array(start: int, num_tokens: int, *, first: int, window: int | None) -> mx.array:
    positions = mx.arange(start, start + num_tokens)[:, None]
    return causal_mask(positions, range(first, start + num_tokens), window=window)
