"""Layouts of matrices that suit a CPU; its BLAS multiplies few rows fast with those of float32. None costs memory.

A step reads every weight once, and MKL reads a matrix whose lines are short, such as `(49152, 576)`, at half the speed
of one whose lines are long: so wide matrices are stored transposed. From four rows on it packs the whole matrix first,
which blocks of it that stay in a core's own memory avoid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import define

from headrace_models.layers import Dense, Linear, SplitLinear, fuse

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace_models.layers import Projection, Weight

__all__ = [
    "Blocks",
    "Columns",
    "GateUpApart",
    "GateUpColumns",
    "fuse_for_cpu",
    "gate_up_for_cpu",
    "head_for_cpu",
    "stacked_for_cpu",
]

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
    """At most O; rows beyond the last whole block are multiplied apart."""

    @property
    def num_rows(self) -> int:
        return self.matrix.shape[0]

    def project(self, x: mx.array) -> mx.array:
        num_columns = self.matrix.shape[1]
        if x.size // num_columns not in _BLOCKED_ROWS:
            return x @ self.matrix.T
        num_blocked = self.num_rows // self.block_size * self.block_size
        blocks = self.matrix[:num_blocked].reshape(-1, self.block_size, num_columns).swapaxes(1, 2)
        found = x.reshape(1, -1, num_columns) @ blocks
        found = found.swapaxes(0, 1).reshape(*x.shape[:-1], num_blocked)
        if num_blocked == self.num_rows:
            return found
        return mx.concatenate([found, x @ self.matrix[num_blocked:].T], axis=-1)

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
        # Views, where an index would gather a copy of each.
        gate, up = mx.split(both, 2)
        shape = (*x.shape[:-1], both.shape[-1])
        return gate.reshape(shape), up.reshape(shape)

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        yield self.matrices
        if self.bias is not None:
            yield self.bias


@define
class GateUpApart:
    """Gate and up as they are."""

    gate: Linear
    up: Linear

    def pair(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return gate and up of `x (..., I)`, both `(..., M)`."""
        return self.gate(x), self.up(x)

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        yield from self.gate.arrays()
        yield from self.up.arrays()


def fuse_for_cpu(parts: Sequence[Linear]) -> Projection:
    """Bring matrices over the same input into the form that suits a CPU: as columns, stacked, or apart.

    All but float32 stays apart: stacking saves launching an operation, which is nothing beside such a product on a CPU,
    and would copy what is loaded.

    Raises:
        WeightMismatch: if only some parts have a bias.
    """
    fused = fuse(parts)
    matrices = [matrix for part in parts if (matrix := _float32(part.weight)) is not None]
    if not isinstance(fused, Linear) or len(matrices) < len(parts):
        return SplitLinear(tuple(parts)) if len(parts) > 1 else parts[0]
    if sum(matrix.shape[0] for matrix in matrices) <= matrices[0].shape[1]:
        return fused
    # Each is copied once, to its columns; one alone would stay a view without the second operation.
    return Linear(Columns(mx.contiguous(mx.concatenate([matrix.T for matrix in matrices], axis=1))), fused.bias)


def gate_up_for_cpu(gate: Linear, up: Linear) -> GateUpColumns | GateUpApart:
    """Return gate and up, both `(M, I)`, in the form that suits a CPU, see `fuse_for_cpu`."""
    matrices = _float32(gate.weight), _float32(up.weight)
    if matrices[0] is None or matrices[1] is None:
        return GateUpApart(gate, up)
    stacked = mx.stack([matrices[0].T, matrices[1].T])
    biases = [part.bias for part in (gate, up) if part.bias is not None]
    return GateUpColumns(stacked, mx.stack(biases)[:, None] if biases else None)


def stacked_for_cpu(gate_up: Linear) -> GateUpColumns | None:
    """Return the columns of gate above up in one matrix `(2M, I)`; None if it is not plain float32."""
    matrix = _float32(gate_up.weight)
    if matrix is None:
        return None
    halves = mx.contiguous(matrix.reshape(2, -1, matrix.shape[1]).swapaxes(1, 2))
    return GateUpColumns(halves, None if gate_up.bias is None else gate_up.bias.reshape(2, 1, -1))


def head_for_cpu(weight: Weight) -> Weight:
    """Return a vocabulary's matrix with a layout that suits few rows, in the same memory, or itself."""
    matrix = _float32(weight)
    if matrix is None:
        return weight
    fitting = [size for size in _BLOCK_SIZES if size <= matrix.shape[0]]
    whole = [size for size in fitting if matrix.shape[0] % size == 0]
    return Blocks(matrix, (whole or fitting)[0]) if fitting else weight


def _float32(weight: Weight) -> mx.array | None:
    return weight.matrix if isinstance(weight, Dense) and weight.matrix.dtype == mx.float32 else None
