"""The two buffers of one layer's slots, grown on demand and written in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_kvcache.geometry import check_fits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_kvcache.placement import Placement

MIN_CAPACITY = 256


def power_of_two_at_least(count: int, *, least: int = 1) -> int:
    """Return the smallest power of two that holds `count`, at least `least`."""
    return max(least, 1 << max(0, count - 1).bit_length())


class SlotBuffers:
    """Keys `(S, Hk, C, D)` and values `(S, Hk, C, Dv)` of one layer: S slots of capacity C.

    Nothing is allocated before the first write. A buffer has one holder, this object: any other live reference
    or view turns the next write into a full copy.
    """

    __slots__ = ("keys", "values")

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def write(
        self, placement: Placement, keys: mx.array, values: mx.array, *, size: tuple[int, int]
    ) -> tuple[mx.array, mx.array]:
        """Write each row's positions at its own place.

        Args:
            placement: where each row's positions go.
            keys: `(B, Hk, T, D)`.
            values: `(B, Hk, T, Dv)`.
            size: least number of slots and least capacity that the buffers must have afterwards.

        Returns:
            The buffers, for reading in this step only.
        """
        old_keys, old_values = self.keys, self.values
        if old_keys is None or old_values is None:
            new_keys, new_values = _zeros(keys, size), _zeros(values, size)
        else:
            check_fits(old_keys, keys, "keys")
            check_fits(old_values, values, "values")
            new_keys, new_values = _grown(old_keys, size), _grown(old_values, size)
        placement.store(new_keys, keys)
        placement.store(new_values, values)
        self.keys, self.values = new_keys, new_values
        return new_keys, new_values

    def release(self) -> None:
        """Drop the buffers; steps in flight keep what they still read."""
        self.keys = self.values = None

    @property
    def arrays(self) -> Sequence[mx.array]:
        """The buffers that exist now."""
        return [] if self.keys is None or self.values is None else [self.keys, self.values]


def _zeros(added: mx.array, size: tuple[int, int]) -> mx.array:
    return mx.zeros((size[0], added.shape[1], size[1], added.shape[3]), added.dtype)


def _grown(buffer: mx.array, size: tuple[int, int]) -> mx.array:
    num_slots, num_heads, capacity, head_dim = buffer.shape
    if num_slots >= size[0] and capacity >= size[1]:
        return buffer
    shape = (max(num_slots, size[0]), num_heads, max(capacity, size[1]), head_dim)
    grown = mx.zeros(shape, buffer.dtype)
    grown[:num_slots, :, :capacity] = buffer
    return grown
