"""What encoder and decoder share: heads, self-attention over a whole sequence, and the feed-forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

if TYPE_CHECKING:
    from collections.abc import Iterator

    import mlx.core as mx

    from headrace_models.layers import LayerNorm, Projection
    from headrace_models.whisper.host import Activation

__all__ = ["FeedForward", "merge_heads", "split_heads"]


def split_heads(x: mx.array, num_heads: int) -> mx.array:
    """`(B, T, H * D)` to `(B, H, T, D)`."""
    return x.reshape(*x.shape[:-1], num_heads, -1).swapaxes(1, 2)


def merge_heads(x: mx.array) -> mx.array:
    """`(B, H, T, D)` to `(B, T, H * D)`."""
    rows, heads, positions, size = x.shape
    return x.swapaxes(1, 2).reshape(rows, positions, heads * size)


@define
class FeedForward:
    """Norm, four times as wide, GELU, and back."""

    norm: LayerNorm
    up: Projection
    down: Projection
    activation: Activation

    def __call__(self, x: mx.array) -> mx.array:
        return self.down(self.activation(self.up(self.norm(x))))

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        for part in (self.norm, self.up, self.down):
            yield from part.arrays()
