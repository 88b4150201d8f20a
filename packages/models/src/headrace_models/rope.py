"""Rotary position embedding in two forms that agree: precomputed angles, and MLX's fused kernel.

On CPU `mx.fast.rope` falls back to many small operations and computes the same angles again in every layer,
so `AngleRope` computes cosines and sines once per step. On GPUs the fused kernel is faster.
Pairs are halves of a head ("neox"), as most Hugging Face checkpoints have them, or neighbours ("traditional").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import mlx.core as mx
from attrs import define, frozen

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_models.rope_scaling import RopeAngles

__all__ = ["AngleRope", "FusedRope", "Rope"]

# Of the matrices of a step's rows: above, multiplying with their zeros costs more than operations do.
_MOST_MATRIX_ELEMENTS = 1 << 16


class Rope(Protocol):
    """A rotary embedding; `at` is called once per forward, its result once per layer."""

    def at(self, offset: int | mx.array, num_tokens: int, dtype: mx.Dtype) -> Callable[[mx.array], mx.array]:
        """Make the rotation of the positions `offset + [0, num_tokens)` for heads `(B, H, T, D)` of `dtype`.

        Args:
            offset: positions before the append, one for all rows or `(B,) int32`.
        """
        ...


@define
class AngleRope:
    """Rotation by cosines and sines that are computed once per step and shared by all layers."""

    frequencies: mx.array
    """`(R/2,) float32`, of the first R components of a head."""
    magnitude: float = 1.0
    is_traditional: bool = False

    @classmethod
    def from_angles(cls, angles: RopeAngles, *, is_traditional: bool = False) -> AngleRope:
        """Make the rotation from what `rope_angles` returns."""
        return cls(mx.array(angles.frequencies, dtype=mx.float32), angles.magnitude, is_traditional)

    def at(self, offset: int | mx.array, num_tokens: int, dtype: mx.Dtype) -> Callable[[mx.array], mx.array]:
        """See `Rope.at`."""
        steps = mx.arange(num_tokens)
        positions = (steps + offset)[None] if isinstance(offset, int) else offset[:, None] + steps
        angles = positions.astype(mx.float32)[:, None, :, None] * self.frequencies
        cosines, sines = mx.cos(angles), mx.sin(angles)
        if self.magnitude != 1:
            cosines, sines = cosines * self.magnitude, sines * self.magnitude
        cosines, sines = cosines.astype(dtype), sines.astype(dtype)
        if self.is_traditional:
            return _NeighbourRotation(cosines, sines)
        cosines, sines = mx.concatenate([cosines, cosines], axis=-1), mx.concatenate([-sines, sines], axis=-1)
        if num_tokens == 1 and dtype == mx.float32 and cosines.size * cosines.shape[-1] <= _MOST_MATRIX_ELEMENTS:
            return _MatrixRotation.from_halves(cosines, sines)
        return _HalvesRotation(cosines, sines)


@define
class _HalvesRotation:
    """One step's rotation: `cosines` and signed `sines`, both `(B or 1, 1, T, R)`."""

    cosines: mx.array
    sines: mx.array

    def __call__(self, heads: mx.array) -> mx.array:
        size = self.cosines.shape[-1]
        if heads.shape[-1] == size:
            return self._rotated(heads)
        return mx.concatenate([self._rotated(heads[..., :size]), heads[..., size:]], axis=-1)

    def _rotated(self, heads: mx.array) -> mx.array:
        low, high = mx.split(heads, 2, axis=-1)
        return heads * self.cosines + mx.concatenate([high, low], axis=-1) * self.sines


@define
class _MatrixRotation:
    """One position's rotation of each row as a matrix `(B or 1, R, R)`: one operation a layer, not six."""

    matrix: mx.array

    @classmethod
    def from_halves(cls, cosines: mx.array, sines: mx.array) -> _MatrixRotation:
        """Make it of `cosines` and signed `sines`, both `(B or 1, 1, 1, R)`."""
        identity, half = mx.eye(cosines.shape[-1]), cosines.shape[-1] // 2
        swapped = mx.concatenate([identity[half:], identity[:half]])
        return cls(identity * cosines[:, 0] + swapped * sines[:, 0])

    def __call__(self, heads: mx.array) -> mx.array:
        size = self.matrix.shape[-1]
        rows, num_heads, _, head_dim = heads.shape
        flat = heads.reshape(rows, num_heads, head_dim)
        if head_dim == size:
            rotated = flat @ self.matrix
        else:
            rotated = mx.concatenate([flat[..., :size] @ self.matrix, flat[..., size:]], axis=-1)
        return rotated.reshape(heads.shape)


@define
class _NeighbourRotation:
    """One step's rotation: `cosines` and `sines`, both `(B or 1, 1, T, R/2)`."""

    cosines: mx.array
    sines: mx.array

    def __call__(self, heads: mx.array) -> mx.array:
        size = 2 * self.cosines.shape[-1]
        even, odd = heads[..., 0:size:2], heads[..., 1:size:2]
        pairs = mx.stack([even * self.cosines - odd * self.sines, odd * self.cosines + even * self.sines], axis=-1)
        rotated = mx.flatten(pairs, -2)
        return rotated if heads.shape[-1] == size else mx.concatenate([rotated, heads[..., size:]], axis=-1)


@frozen
class FusedRope:
    """Rotation by `mx.fast.rope`, which takes one offset for all rows or one per row."""

    wavelengths: mx.array
    """Reciprocal frequencies, `(R/2,) float32`, as the kernel wants them."""
    magnitude: float = 1.0
    is_traditional: bool = False

    @classmethod
    def from_angles(cls, angles: RopeAngles, *, is_traditional: bool = False) -> FusedRope:
        """Make the rotation from what `rope_angles` returns."""
        wavelengths = mx.reciprocal(mx.array(angles.frequencies, dtype=mx.float32))
        return cls(wavelengths, angles.magnitude, is_traditional)

    def at(self, offset: int | mx.array, num_tokens: int, dtype: mx.Dtype) -> Callable[[mx.array], mx.array]:
        """See `Rope.at`."""
        del num_tokens, dtype  # the kernel reads both from the heads
        size = 2 * self.wavelengths.shape[0]

        def rotate(heads: mx.array) -> mx.array:
            return mx.fast.rope(
                self._magnified(heads, size),
                size,
                traditional=self.is_traditional,
                base=None,
                scale=1.0,
                offset=offset,
                freqs=self.wavelengths,
            )

        return rotate

    def _magnified(self, heads: mx.array, size: int) -> mx.array:
        if self.magnitude == 1:
            return heads
        if heads.shape[-1] == size:
            return heads * self.magnitude
        return mx.concatenate([heads[..., :size] * self.magnitude, heads[..., size:]], axis=-1)
