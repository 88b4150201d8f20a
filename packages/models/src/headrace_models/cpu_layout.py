"""Layouts of float32 matrices in which a CPU's BLAS multiplies few rows fast. No layout costs memory.

A step reads every weight once, and MKL reads a matrix whose lines are short, such as `(49152, 576)`, at half the speed
of one whose lines are long: so wide matrices are stored transposed. From four rows on it packs the whole matrix first,
which blocks of it that stay in a core's own memory avoid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import define

from headrace_models.layers import Dense, Linear

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_models.layers import Projection, Weight

__all__ = ["Blocks", "Columns", "GateUpColumns", "gate_up_for_cpu", "head_for_cpu", "projection_for_cpu"]

# Rows of activations for which blocks pay: below, one pass is as fast; above, packing the matrix is worth it.
_BLOCKED_ROWS = range(4, 33)
_BLOCK_SIZES = (192, 256, 128)


@define
class Columns:
    """A matrix `(O, I)` stored as `(I, O)`."""

    matrix: mx.array

    @property
    def num_rows(self) -> int:
        return self.matrix.shape[1]

    def project(self, x: mx.array) -> mx.array:
        return x @ self.matrix

    def take(self, ids: mx.array) -> mx.array:
        return mx.moveaxis(self.matrix[:, ids], 0, -1)

    def arrays(self) -> Iterator[mx.array]:
        yield self.matrix


@define
class Blocks:
    """A matrix `(O, I)` as it is, multiplied in blocks of its rows where that is faster."""

    matrix: mx.array
    block_size: int
    """A divisor of O."""

    @property
    def num_rows(self) -> int:
        return self.matrix.shape[0]

    def project(self, x: mx.array) -> mx.array:
        num_columns = self.matrix.shape[1]
        if x.size // num_columns not in _BLOCKED_ROWS:
            return x @ self.matrix.T
        blocks = self.matrix.reshape(-1, self.block_size, num_columns).swapaxes(1, 2)
        found = x.reshape(1, -1, num_columns) @ blocks
        return found.swapaxes(0, 1).reshape(*x.shape[:-1], self.num_rows)

    def take(self, ids: mx.array) -> mx.array:
        return self.matrix[ids]

    def arrays(self) -> Iterator[mx.array]:
        yield self.matrix


@define
class GateUpColumns:
    """Gate and up, both `(M, I)`, stored as `(2, I, M)`: one operation, two products."""

    matrices: mx.array
    bias: mx.array | None
    """`(2, 1, M)`."""

    def pair(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return gate and up of `x (..., I)`, both `(..., M)`."""
        both = x.reshape(1, -1, x.shape[-1]) @ self.matrices
        if self.bias is not None:
            both = both + self.bias
        shape = (*x.shape[:-1], both.shape[-1])
        return both[0].reshape(shape), both[1].reshape(shape)

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        yield self.matrices
        if self.bias is not None:
            yield self.bias


def projection_for_cpu(projection: Projection) -> Projection:
    """Return a projection with a layout that suits its shape, or itself."""
    if not isinstance(projection, Linear):
        return projection
    matrix = _float32(projection.weight)
    if matrix is None or matrix.shape[0] <= matrix.shape[1]:
        return projection
    return Linear(Columns(mx.contiguous(matrix.T)), projection.bias)


def gate_up_for_cpu(stacked: Projection) -> GateUpColumns | None:
    """Return the layout of gate above up in one matrix `(2M, I)`; None if it is not plain float32."""
    if not isinstance(stacked, Linear):
        return None
    matrix = _float32(stacked.weight)
    if matrix is None:
        return None
    halves = mx.contiguous(matrix.reshape(2, -1, matrix.shape[1]).swapaxes(1, 2))
    return GateUpColumns(halves, None if stacked.bias is None else stacked.bias.reshape(2, 1, -1))


def head_for_cpu(weight: Weight) -> Weight:
    """Return a vocabulary's matrix with a layout that suits few rows, in the same memory, or itself."""
    matrix = _float32(weight)
    if matrix is None:
        return weight
    size = next((size for size in _BLOCK_SIZES if matrix.shape[0] % size == 0), None)
    return weight if size is None else Blocks(matrix, size)


def _float32(weight: Weight) -> mx.array | None:
    return weight.matrix if isinstance(weight, Dense) and weight.matrix.dtype == mx.float32 else None
