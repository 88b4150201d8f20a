"""The feed-forward blocks: gated (gate, up, down) and plain (up, down)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import define

from headrace_models.activations import activation_of
from headrace_models.cpu_layout import GateUpApart, GateUpColumns, gate_up_for_cpu, stacked_for_cpu
from headrace_models.layers import fuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace_models.family import Activation
    from headrace_models.layers import Linear, Projection

__all__ = ["FeedForward", "PlainFeedForward"]


@define
class FeedForward:
    """Gated feed-forward: `down(activate(gate(x)) * up(x))` with gate and up stacked, or as suits a CPU."""

    gate_up: Projection | GateUpColumns | GateUpApart
    down: Projection
    activate: Callable[[mx.array], mx.array]

    @classmethod
    def from_parts(
        cls, gate: Linear, up: Linear, down: Projection, *, activation: Activation, on_gpu: bool
    ) -> FeedForward:
        """Bring gate and up together.

        Args:
            on_gpu: stack them, rather than take the layout that suits a CPU.
        """
        stacked = fuse([gate, up])  # which also holds their biases against each other
        return cls(stacked if on_gpu else gate_up_for_cpu(gate, up), down, activation_of(activation))

    @classmethod
    def from_stacked(cls, gate_up: Linear, down: Projection, *, activation: Activation, on_gpu: bool) -> FeedForward:
        """As `from_parts`, from gate above up in one matrix."""
        columns = None if on_gpu else stacked_for_cpu(gate_up)
        return cls(gate_up if columns is None else columns, down, activation_of(activation))

    def __call__(self, x: mx.array) -> mx.array:
        if isinstance(self.gate_up, GateUpColumns | GateUpApart):
            gate, up = self.gate_up.pair(x)
        else:
            gate, up = mx.split(self.gate_up(x), 2, axis=-1)
        return self.down(self.activate(gate) * up)

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        yield from self.gate_up.arrays()
        yield from self.down.arrays()


@define
class PlainFeedForward:
    """Feed-forward without a gate: `down(activate(up(x)))`."""

    up: Projection
    down: Projection
    activate: Callable[[mx.array], mx.array]

    def __call__(self, x: mx.array) -> mx.array:
        return self.down(self.activate(self.up(x)))

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        yield from self.up.arrays()
        yield from self.down.arrays()
