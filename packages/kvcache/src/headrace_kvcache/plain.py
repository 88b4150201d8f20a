"""The plain single-row cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, TypeAlias

from headrace_kvcache.errors import EmptyCache
from headrace_kvcache.fields import part, slabs
from headrace_kvcache.forms import PlainForm
from headrace_kvcache.linear import LinearCache
from headrace_kvcache.merging import Mergeable
from headrace_kvcache.quantized import QuantizedKVCache

if TYPE_CHECKING:
    import mlx.core as mx

    from headrace_kvcache.stored import Side

State: TypeAlias = "tuple[Side, Side, int]"


class KVCache(LinearCache, Mergeable):
    """Keys and values of one layer as they come, appended in place into slabs of 256 positions.

    Attributes:
        offset: number of positions held, the same for every row of the arrays.
    """

    def __init__(self) -> None:
        super().__init__(PlainForm())

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> QuantizedKVCache:
        """Return a quantized cache of the same positions; mlx-lm's generation calls it by these names.

        Raises:
            InvalidGeometry: bits or a group size that MLX does not pack, or a head that is not made of whole groups.
        """
        quantized = QuantizedKVCache(bits=bits, group_size=group_size)
        if self._fields is not None and self.offset:
            keys, values = self.slab_arrays()
            quantized.form.check(keys, values)
            encoded, count = quantized.form.encode(keys, values), quantized.form.num_key_fields
            quantized.state = (encoded[:count], encoded[count:], self.offset, group_size, bits)
        return quantized

    def slab_arrays(self) -> tuple[mx.array, mx.array]:
        """Return views of the slabs that hold positions, `(B, H, ceil(offset / 256) * 256, D)` and `(..., Dv)`.

        Raises:
            EmptyCache: nothing was appended yet.
        """
        if self._fields is None:
            raise EmptyCache("the cache holds nothing yet; append keys and values first")
        keys, values = part(self._fields, 0, slabs(self.offset))
        return keys, values

    @property
    def state(self) -> State:
        """Buffers and offset, to be evaluated or saved, in array objects of their own; drop them before an append."""
        return (*self._sides(), self.offset)

    @state.setter
    def state(self, state: State) -> None:
        keys, values, self.offset = state
        self._set_sides(keys, values)

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Make a cache from another one's `state`; the two share bytes until one of them is written."""
        cache = cls()
        cache.state = state
        cache.state = cache.state
        return cache
