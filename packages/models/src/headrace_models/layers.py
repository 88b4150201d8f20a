"""Building blocks of the families: matrices (dense, packed, fused), embeddings and norms.

Plain attrs classes that hold arrays and are called; nothing here knows about caches or positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import mlx.core as mx
from attrs import define, evolve

from headrace_models.errors import WeightMismatch
from headrace_models.row_blocks import join_blocks, rows_per_block

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "Dense",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Norm",
    "Packed",
    "Projection",
    "SplitLinear",
    "Weight",
    "fuse",
]

PackingMode = Literal["affine", "mxfp4", "nvfp4", "mxfp8"]

_WORD_BITS = 32


class Weight(Protocol):
    """A matrix `(O, I)` in some representation."""

    @property
    def num_rows(self) -> int: ...

    def project(self, x: mx.array) -> mx.array:
        """Multiply `(..., I)` by the transposed matrix: `(..., O)`."""
        ...

    def take(self, ids: mx.array) -> mx.array:
        """Return the rows `ids (...)` as `(..., I)`."""
        ...

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold it."""
        ...


@define
class Dense:
    """A matrix `(O, I)` of floating point numbers."""

    matrix: mx.array

    @property
    def num_rows(self) -> int:
        return self.matrix.shape[0]

    def project(self, x: mx.array) -> mx.array:
        return x @ self.matrix.T

    def take(self, ids: mx.array) -> mx.array:
        return self.matrix[ids]

    def arrays(self) -> Iterator[mx.array]:
        yield self.matrix


@define
class Packed:
    """A quantized matrix `(O, I)` in MLX's packed form.

    `codes` is `(O, I * bits / 32) uint32`, `scales` and `offsets` are `(O, I / group_size)`; only the affine mode has
    offsets (MLX calls them biases).
    """

    codes: mx.array
    scales: mx.array
    offsets: mx.array | None
    bits: int
    group_size: int
    mode: PackingMode = "affine"

    @property
    def num_rows(self) -> int:
        return self.codes.shape[0]

    @property
    def layout(self) -> tuple[int, int, str]:
        """What two matrices must share to be stacked."""
        return self.bits, self.group_size, self.mode

    def project(self, x: mx.array) -> mx.array:
        return mx.quantized_matmul(
            x,
            self.codes,
            scales=self.scales,
            biases=self.offsets,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )

    def take(self, ids: mx.array) -> mx.array:
        offsets = None if self.offsets is None else self.offsets[ids]
        return self._unpack(self.codes[ids], self.scales[ids], offsets)

    def arrays(self) -> Iterator[mx.array]:
        yield self.codes
        yield self.scales
        if self.offsets is not None:
            yield self.offsets

    def dequantize(self, dtype: mx.Dtype) -> mx.array:
        """Return the matrix `(O, I)` in `dtype`, computed in float32 because 16-bit scales would round twice.

        A large matrix is evaluated block by block, so that nothing but the result has its size.
        """
        num_columns = self.codes.shape[-1] * _WORD_BITS // self.bits
        step = rows_per_block(num_columns)
        if self.num_rows <= step:
            return self._dequantize(dtype)
        blocks = (self.rows(start, start + step).dequantize(dtype) for start in range(0, self.num_rows, step))
        return join_blocks((self.num_rows, num_columns), dtype, blocks)

    def rows(self, start: int, stop: int) -> Packed:
        """Return the rows from `start` to before `stop`, as a view."""
        offsets = None if self.offsets is None else self.offsets[start:stop]
        return evolve(self, codes=self.codes[start:stop], scales=self.scales[start:stop], offsets=offsets)

    def _dequantize(self, dtype: mx.Dtype) -> mx.array:
        if self.mode != "affine" or self.offsets is None:
            return self._unpack(self.codes, self.scales, None).astype(dtype)
        scales, offsets = self.scales.astype(mx.float32), self.offsets.astype(mx.float32)
        if self.bits not in (4, 8):
            return self._unpack(self.codes, scales, offsets).astype(dtype)
        groups = self._code_bytes().reshape(*scales.shape, self.group_size)
        values = groups * scales[..., None] + offsets[..., None]
        return values.reshape(self.num_rows, -1).astype(dtype)

    def _code_bytes(self) -> mx.array:
        """Spread 4- or 8-bit codes to bytes; plain arithmetic on them is twice as fast as MLX's own on CPU."""
        octets = self.codes.view(mx.uint8)
        if self.bits == 8:
            return octets
        return mx.stack([octets & 15, octets >> 4], axis=-1)

    def with_activations(self, dtype: mx.Dtype) -> Packed:
        """Return it with affine scales in `dtype`, the type of the activations it is multiplied with."""
        if self.mode != "affine" or self.offsets is None:
            return self
        scales, offsets = self.scales.astype(dtype), self.offsets.astype(dtype)
        return Packed(self.codes, scales, offsets, self.bits, self.group_size, self.mode)

    def _unpack(self, codes: mx.array, scales: mx.array, offsets: mx.array | None) -> mx.array:
        return mx.dequantize(codes, scales, offsets, group_size=self.group_size, bits=self.bits, mode=self.mode)


class Projection(Protocol):
    """Something that maps `(..., I)` to `(..., O)`."""

    def __call__(self, x: mx.array) -> mx.array: ...

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold it."""
        ...


@define
class Linear:
    """A matrix with an optional bias `(O,)`."""

    weight: Weight
    bias: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        projected = self.weight.project(x)
        return projected if self.bias is None else projected + self.bias

    def arrays(self) -> Iterator[mx.array]:
        yield from self.weight.arrays()
        if self.bias is not None:
            yield self.bias


@define
class SplitLinear:
    """Matrices over the same input that are not stacked: their quantization differs, or stacking would not pay."""

    parts: tuple[Linear, ...]

    def __call__(self, x: mx.array) -> mx.array:
        return mx.concatenate([part(x) for part in self.parts], axis=-1)

    def arrays(self) -> Iterator[mx.array]:
        for part in self.parts:
            yield from part.arrays()


def fuse(parts: Sequence[Linear]) -> Linear | SplitLinear:
    """Stack matrices over the same input, so that a step multiplies once: one `Linear` with all rows, in order.

    Raises:
        WeightMismatch: if only some parts have a bias.
    """
    biases = [part.bias for part in parts if part.bias is not None]
    if biases and len(biases) != len(parts):
        raise WeightMismatch(f"{len(biases)} of {len(parts)} fused projections have a bias; all or none must have one.")
    weight = _stack([part.weight for part in parts])
    if weight is None:
        return SplitLinear(tuple(parts))
    return Linear(weight, mx.concatenate(biases) if biases else None)


def _stack(weights: Sequence[Weight]) -> Weight | None:
    dense = [weight for weight in weights if isinstance(weight, Dense)]
    if len(dense) == len(weights):
        return Dense(mx.concatenate([weight.matrix for weight in dense]))
    packed = [weight for weight in weights if isinstance(weight, Packed)]
    if len(packed) != len(weights) or len({weight.layout for weight in packed}) != 1:
        return None
    offsets = [weight.offsets for weight in packed if weight.offsets is not None]
    return Packed(
        mx.concatenate([weight.codes for weight in packed]),
        mx.concatenate([weight.scales for weight in packed]),
        mx.concatenate(offsets) if offsets else None,
        packed[0].bits,
        packed[0].group_size,
        packed[0].mode,
    )


@define
class Embedding:
    """Token embedding `(V, D)`; `project` is the tied head."""

    weight: Weight
    scale: float | None = None
    """Factor of what is looked up; the head does not have it."""

    def __call__(self, ids: mx.array) -> mx.array:
        found = self.weight.take(ids)
        return found if self.scale is None else found * self.scale

    def project(self, hidden: mx.array) -> mx.array:
        """Score `(..., D)` against every token: `(..., V)`."""
        return self.weight.project(hidden)

    def arrays(self) -> Iterator[mx.array]:
        yield from self.weight.arrays()


@define
class Norm:
    """Root mean square norm over the last axis with gain `(D,)`."""

    gain: mx.array
    epsilon: float

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.gain, self.epsilon)

    def arrays(self) -> Iterator[mx.array]:
        yield self.gain


@define
class LayerNorm:
    """Norm by mean and variance over the last axis with gain and bias `(D,)`."""

    gain: mx.array
    bias: mx.array
    epsilon: float

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, self.gain, self.bias, self.epsilon)

    def arrays(self) -> Iterator[mx.array]:
        yield self.gain
        yield self.bias
