"""The affine-quantized single-row cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, TypeAlias

from headrace_kvcache.forms import AffineForm
from headrace_kvcache.linear import LinearCache
from headrace_kvcache.merging import Mergeable

if TYPE_CHECKING:
    from headrace_kvcache.stored import Side

State: TypeAlias = "tuple[Side, Side, int, int, int]"


class QuantizedKVCache(LinearCache, Mergeable):
    """Keys and values of one layer as affine triples, appended in place into slabs of 256 positions.

    `attend` works on the packed bits; `update_and_fetch` gives mlx-lm's models the dequantized arrays.

    Args:
        bits: bits per element: 2, 3, 4, 5, 6 or 8.
        group_size: elements of a head that share a scale and a bias: 32, 64 or 128.

    Raises:
        InvalidGeometry: bits or a group size that MLX does not pack.
    """

    def __init__(self, *, bits: int = 8, group_size: int = 64) -> None:
        self._affine = AffineForm(bits, group_size)
        super().__init__(self._affine)

    @property
    def state(self) -> State:
        """Triples, offset, group size and bits, in array objects of their own; drop them before an append."""
        return (*self._sides(), self.offset, self._affine.group_size, self._affine.bits)

    @state.setter
    def state(self, state: State) -> None:
        keys, values, self.offset, group_size, bits = state
        self._form = self._affine = AffineForm(bits, group_size)
        self._set_sides(keys, values)

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Make a cache from another one's `state`; the two share bytes until one of them is written."""
        cache = cls()
        cache.state = state
        cache.state = cache.state
        return cache
