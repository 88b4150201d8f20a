"""The root mean square norm of decode steps on a CPU, where MLX's own is eleven small operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import define, field

from headrace_models.layers import Norm

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ProductNorm", "norm_for_cpu"]


@define
class ProductNorm:
    """As `Norm`; where each row has one position, the mean of squares is a product of the row with itself."""

    gain: mx.array
    """`(D,) float32`."""
    epsilon: float
    # With as many dimensions as a step's hidden states: nothing is broadcast for one row.
    _gain: mx.array = field(init=False, repr=False)
    _epsilon: mx.array = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._gain = self.gain[None, None]
        self._epsilon = mx.full((1, 1, 1), self.epsilon)
        # No weight, so nobody else evaluates it; and only what is evaluated may be used by other threads.
        mx.eval(self._epsilon)

    def __call__(self, x: mx.array) -> mx.array:
        """Norm `(..., D)`."""
        if x.ndim != self._gain.ndim or x.shape[1] != 1 or x.dtype != mx.float32:
            return mx.fast.rms_norm(x, self.gain, self.epsilon)
        mean_square = mx.addmm(self._epsilon, x, x.swapaxes(1, 2), alpha=1 / x.shape[-1])
        return x * mx.rsqrt(mean_square) * self._gain

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        yield self._gain


def norm_for_cpu(gain: mx.array, epsilon: float) -> Norm | ProductNorm:
    """Return the form that suits a CPU; half precision keeps MLX's kernel, which adds up in float32."""
    return ProductNorm(gain, epsilon) if gain.dtype == mx.float32 else Norm(gain, epsilon)
