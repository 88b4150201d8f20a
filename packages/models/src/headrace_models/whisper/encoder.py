"""Whisper's encoder: two convolutions, sinusoids, and blocks over the whole window (Radford et al. 2022)."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from attrs import define

from headrace_models.whisper.blocks import FeedForward, merge_heads, split_heads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_models.layers import LayerNorm, Projection
    from headrace_models.whisper.host import Activation, Attend

__all__ = ["AudioEncoder", "Convolution", "EncoderBlock", "sinusoids"]

_TIMESCALE = 10_000
_KERNEL = 3


def sinusoids(length: int, channels: int) -> mx.array:
    """Return positions `(length, channels)` float32: sines of all timescales, then cosines."""
    increment = log(_TIMESCALE) / (channels // 2 - 1)
    angles = np.arange(length)[:, None] * np.exp(-increment * np.arange(channels // 2))
    return mx.array(np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32))


@define
class Convolution:
    """A convolution of kernel 3 and padding 1 along time, as one product: a CPU's BLAS does it, at 20 times MLX's own.

    `matrix` is `(3 * in, out)`, kernel position by kernel position.
    """

    matrix: mx.array
    bias: mx.array
    stride: int

    @classmethod
    def from_kernel(cls, kernel: mx.array, bias: mx.array, stride: int) -> Convolution:
        """Make it of MLX's `(out, 3, in)`."""
        return cls(kernel.reshape(kernel.shape[0], -1).T, bias, stride)

    def __call__(self, x: mx.array) -> mx.array:
        """`(B, T, in)` to `(B, T / stride, out)`."""
        padded = mx.pad(x, [(0, 0), (1, 1), (0, 0)])
        length = x.shape[1]
        taps = [padded[:, tap : tap + length : self.stride] for tap in range(_KERNEL)]
        return mx.concatenate(taps, axis=-1) @ self.matrix + self.bias

    def arrays(self) -> Iterator[mx.array]:
        yield self.matrix
        yield self.bias


@define
class EncoderBlock:
    """Self-attention over all positions, then the feed-forward."""

    norm: LayerNorm
    query_key_value: Projection
    out: Projection
    feed_forward: FeedForward
    num_heads: int
    attend: Attend

    def __call__(self, x: mx.array) -> mx.array:
        queries, keys, values = (
            split_heads(part, self.num_heads) for part in mx.split(self.query_key_value(self.norm(x)), 3, axis=-1)
        )
        x = x + self.out(merge_heads(self.attend(queries, keys, values)))
        return x + self.feed_forward(x)

    def arrays(self) -> Iterator[mx.array]:
        for part in (self.norm, self.query_key_value, self.out, self.feed_forward):
            yield from part.arrays()


@define
class AudioEncoder:
    """From a log-mel window to features."""

    convolutions: tuple[Convolution, Convolution]
    positions: mx.array
    """`(audio_context, state)`."""
    blocks: tuple[EncoderBlock, ...]
    norm: LayerNorm
    activation: Activation

    def __call__(self, mel: mx.array) -> mx.array:
        """Encode windows.

        Args:
            mel: `(B, 2 * N, num_mels)` in the model's dtype; N of at most the audio context.

        Returns:
            `(B, N, state)`.
        """
        for convolution in self.convolutions:
            mel = self.activation(convolution(mel))
        x = mel + self.positions[: mel.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        for convolution in self.convolutions:
            yield from convolution.arrays()
        yield self.positions
        for block in self.blocks:
            yield from block.arrays()
        yield from self.norm.arrays()
