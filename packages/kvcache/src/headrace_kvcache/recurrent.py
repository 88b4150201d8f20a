"""The single-row cache of recurrent layers: a fixed number of arrays that sum up everything so far."""

from __future__ import annotations

from typing import Self, TypeAlias

import mlx.core as mx

from headrace_kvcache.errors import InvalidGeometry, NotTrimmable
from headrace_kvcache.merging import Mergeable
from headrace_kvcache.stored import check_count

State: TypeAlias = "tuple[list[mx.array | None], mx.array | None, int]"


class RecurrentCache(Mergeable):
    """Arrays of a recurrent layer, by index: usually the tail of a convolution, then a float32 state.

    It has no time axis, costs nothing per token and can never be trimmed or quantized. Layers replace the arrays and
    call `advance`. Rows padded on the right tell their `lengths`; `make_mask` then says which inputs are real.

    Args:
        size: number of arrays.

    Attributes:
        offset: number of positions summed up, as far as the layer tells it by `advance`.
        lengths: how many of the coming inputs of each row are real, `(B,)`; None for all.
    """

    __slots__ = ("_arrays", "lengths", "offset")

    def __init__(self, size: int = 2) -> None:
        if type(size) is not int or size < 1:
            raise InvalidGeometry(f"size is {size!r}; it must be an integer of at least 1")
        self._arrays: list[mx.array | None] = [None] * size
        self.lengths: mx.array | None = None
        self.offset = 0

    def __getitem__(self, index: int) -> mx.array | None:
        return self._arrays[index]

    def __setitem__(self, index: int, array: mx.array | None) -> None:
        self._arrays[index] = array

    def make_mask(self, num_tokens: int) -> mx.array | None:
        """Return which of the coming inputs are real, `(B, num_tokens)`, or None for all."""
        return None if self.lengths is None else mx.arange(num_tokens) < self.lengths[:, None]

    def advance(self, num_tokens: int) -> None:
        """Tell that `num_tokens` inputs per row were summed up."""
        self.offset += num_tokens
        if self.lengths is not None:
            self.lengths = self.lengths - num_tokens

    def trim(self, num_tokens: int) -> int:
        """Return 0 for 0.

        Raises:
            InvalidLength: a negative number, or not an integer.
            NotTrimmable: any other number: a sum cannot forget its last terms.
        """
        check_count(num_tokens)
        if num_tokens:
            raise NotTrimmable(f"a recurrent state cannot forget its last {num_tokens} positions")
        return 0

    def is_trimmable(self) -> bool:
        """Return False: a sum cannot forget its last terms."""
        return False

    def size(self) -> int:
        """Return 0: there is no time axis."""
        return 0

    def empty(self) -> bool:
        """Return whether nothing was ever stored."""
        return self._arrays[0] is None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays held now."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays that are there, in their order."""
        return [array for array in self._arrays if array is not None]

    @property
    def state(self) -> State:
        """Arrays in array objects of their own, lengths and offset."""
        return [None if array is None else array[...] for array in self._arrays], self.lengths, self.offset

    @state.setter
    def state(self, state: State) -> None:
        arrays, self.lengths, self.offset = state
        self._arrays = list(arrays)

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Make a cache from another one's `state`; the two share bytes until one of them is written."""
        cache = cls(len(state[0]))
        cache.state = state
        cache.state = cache.state
        return cache
