"""Inputs that every layer gets from the token itself, beside the residual stream (Gemma 3n and 4).

B rows, T positions, L layers, D hidden size, P size of one layer's input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import mlx.core as mx

    from headrace_models.layers import Embedding, Linear, Norm

__all__ = ["PerLayerGate", "PerLayerInputs"]

_HALF_POWER = 2**-0.5


@define(kw_only=True)
class PerLayerInputs:
    """What all layers get at once: an embedding of their own, and a projection of the model's embedding."""

    embedding: Embedding
    projection: Linear
    norm: Norm
    num_layers: int
    projection_scale: float

    def __call__(self, ids: mx.array, embeddings: mx.array) -> list[mx.array]:
        """Return one input `(B, T, P)` per layer.

        Args:
            ids: tokens `(B, T)`.
            embeddings: what the first layer reads, `(B, T, D)`.
        """
        projected = (self.projection(embeddings) * self.projection_scale).reshape(*ids.shape, self.num_layers, -1)
        own = self.embedding(ids).reshape(projected.shape)
        inputs = (self.norm(projected) + own) * _HALF_POWER
        return [inputs[:, :, index] for index in range(self.num_layers)]

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        for part in (self.embedding, self.projection, self.norm):
            yield from part.arrays()


@define
class PerLayerGate:
    """How a layer takes its input up: as the gated middle of a small block on the residual stream."""

    gate: Linear
    projection: Linear
    activate: Callable[[mx.array], mx.array]

    def __call__(self, x: mx.array, own: mx.array) -> mx.array:
        """Return what to add to `x (B, T, D)` for the layer's input `(B, T, P)`."""
        return self.projection(self.activate(self.gate(x)) * own)

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        yield from self.gate.arrays()
        yield from self.projection.arrays()
