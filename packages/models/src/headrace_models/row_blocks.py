"""Large matrices made a few rows at a time: what is converted never exists twice, and blocks stay in the caches."""

from __future__ import annotations

from itertools import chain
from math import prod
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["StoredTensor", "join_blocks", "rows_per_block"]

_BLOCK_ELEMENTS = 2**20


def rows_per_block(num_columns: int) -> int:
    """Rows of a block of some four megabytes in float32, at least one."""
    return max(1, _BLOCK_ELEMENTS // max(1, num_columns))


def join_blocks(shape: tuple[int, ...], dtype: mx.Dtype, blocks: Iterable[mx.array]) -> mx.array:
    """Write blocks of rows one below the other into an array `shape`; concatenation would hold everything twice."""
    rest = iter(blocks)
    first = next(rest, None)
    if first is not None and first.shape == shape:
        # A lone block is the whole.
        return first.astype(dtype)
    joined = mx.zeros(shape, dtype)
    start = 0
    for block in () if first is None else chain((first,), rest):
        joined[start : start + block.shape[0]] = block.astype(dtype)
        mx.eval(joined)
        start += block.shape[0]
    return joined


@frozen(kw_only=True)
class StoredTensor:
    """A tensor that is decoded when it is taken, block by block.

    Attributes:
        shape: of the decoded tensor.
        blocks: decodes it anew: blocks of rows, in order, in float32 or what float32 holds exactly.
        finish: turns the whole into Hugging Face's convention; None leaves it.
    """

    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[mx.array]]
    finish: Callable[[mx.array], mx.array] | None = None

    @property
    def dtype(self) -> mx.Dtype:
        """What it decodes to."""
        return mx.float32

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def read(self, dtype: mx.Dtype) -> mx.array:
        """Decode it; each element is rounded to `dtype` once."""
        if self.finish is None:
            return join_blocks(self.shape, dtype, self.blocks())
        return self.finish(join_blocks(self.shape, mx.float32, self.blocks())).astype(dtype)
