"""The single-row cache of TurboQuant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, TypeAlias

from headrace_kvcache.linear import LinearCache
from headrace_kvcache.turbo import TurboForm

if TYPE_CHECKING:
    import mlx.core as mx

    from headrace_kvcache.spec import ElementType
    from headrace_kvcache.stored import Side

State: TypeAlias = "tuple[Side, Side, int, int, int, ElementType | None]"


class TurboQuantKVCache(LinearCache):
    """Keys and values of one full-attention layer by TurboQuant, appended in place into slabs of 256 positions.

    Args:
        key_bits: 2, 4, 5 or 8.
        value_bits: 2, 3, 4, 5 or 8.

    Raises:
        InvalidScheme: bits outside these.
    """

    def __init__(self, *, key_bits: int = 8, value_bits: int = 3) -> None:
        self._turbo = TurboForm(key_bits, value_bits)
        super().__init__(self._turbo)

    @property
    def state(self) -> State:
        """Fields, offset, key and value bits and element type, in array objects of their own."""
        turbo = self._turbo
        return (*self._sides(), self.offset, turbo.key_bits, turbo.value_bits, turbo.element_type)

    @state.setter
    def state(self, state: State) -> None:
        keys, values, self.offset, key_bits, value_bits, element_type = state
        self._form = self._turbo = TurboForm(key_bits, value_bits)
        self._turbo.element_type = element_type
        self._set_sides(keys, values)

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Make a cache from another one's `state`; the two share bytes until one of them is written."""
        cache = cls()
        cache.state = state
        cache.state = cache.state
        return cache

    @classmethod
    def from_arrays(cls, keys: mx.array, values: mx.array, offset: int, *, key_bits: int, value_bits: int) -> Self:
        """Make a cache of the first `offset` positions of `keys (B, H, C, D)` and `values (B, H, C, Dv)`.

        Raises:
            InvalidGeometry: a head size that is not rotated.
        """
        cache = cls(key_bits=key_bits, value_bits=value_bits)
        cache.form.check(keys, values)
        cache._fields, cache.offset = cache.form.encode(keys, values), offset
        return cache
