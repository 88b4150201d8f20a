"""Whisper's encoder: two convolutions, sinusoids, and blocks over the whole window (Radford et al. 2022)."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx
import numpy as np
from attrs import define

from headrace_models.whisper.blocks import FeedForward, merge_heads, split_heads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_models.layers import LayerNorm, Projection
    from headrace_models.whisper.host import Activation, Attend

__all__ = ["AudioEncoder", "Convolution", "Encoder", "EncoderBlock", "sinusoids"]

_TIMESCALE = 10_000
_KERNEL = 3


def sinusoids(length: int, channels: int) -> mx.array:
    """Return positions `(length, channels)` float32: sines of all timescales, then cosines."""
    increment = log(_TIMESCALE) / (channels // 2 - 1)
    angles = np.arange(length)[:, None] * np.exp(-increment * np.arange(channels // 2))
    return mx.array(np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32))


@define
class Convolution:
    """A convolution of kernel 3 along time, as one product: a CPU's BLAS does it, at 20 times MLX's own.

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
        """`(B, T, in)`, padding included, to `(B, (T - 1) // stride, out)`."""
        length = (x.shape[1] - _KERNEL) // self.stride * self.stride + 1
        taps = [x[:, tap : tap + length : self.stride] for tap in range(_KERNEL)]
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
        return self.finish(x, self.attend(*self.project(x)))

    def project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return queries, keys and values `(B, H, T, D)` of `x (B, T, state)`."""
        queries, keys, values = mx.split(self.query_key_value(self.norm(x)), 3, axis=-1)
        return (
            split_heads(queries, self.num_heads),
            split_heads(keys, self.num_heads),
            split_heads(values, self.num_heads),
        )

    def finish(self, x: mx.array, attended: mx.array) -> mx.array:
        """Return the block's output for `x` and what its queries attended to, `(B, H, T, D)`."""
        x = x + self.out(merge_heads(attended))
        return x + self.feed_forward(x)

    def arrays(self) -> Iterator[mx.array]:
        for part in (self.norm, self.query_key_value, self.out, self.feed_forward):
            yield from part.arrays()


class Encoder(Protocol):
    """What makes features of log-mel windows."""

    def __call__(self, mel: mx.array) -> mx.array:
        """Encode windows, see `AudioEncoder`."""
        ...

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        ...


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
        x = self.embed(mel, 0, mel.shape[1] // 2)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def embed(self, mel: mx.array, start: int, stop: int) -> mx.array:
        """Return what enters the blocks at the positions from `start` to before `stop`: `(B, stop - start, state)`."""
        first, second = self.convolutions
        # A position reads three outputs of the first convolution, those four frames and one beside them.
        begin = max(0, 2 * start - 1)
        frames = mel[:, max(0, begin - 1) : 2 * stop + 1]
        ends = (int(begin == 0), max(0, 2 * stop + 1 - mel.shape[1]))
        x = self.activation(first(mx.pad(frames, [(0, 0), ends, (0, 0)])))
        x = self.activation(second(mx.pad(x, [(0, 0), (begin - 2 * start + 1, 0), (0, 0)])))
        return x + self.positions[start:stop]

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        for convolution in self.convolutions:
            yield from convolution.arrays()
        yield self.positions
        for block in self.blocks:
            yield from block.arrays()
        yield from self.norm.arrays()
