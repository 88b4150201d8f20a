"""Feed-forward blocks and activations: stacked equals apart, and every form equals its formula."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from headrace_models.activations import (
    activation_of,
    gelu,
)
from headrace_models.cpu_layout import GateUpColumns
from headrace_models.feed_forward import FeedForward, PlainFeedForward
from headrace_models.layers import Dense, Linear


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def close(left: mx.array, right: mx.array, tolerance: float = 1e-4) -> bool:
    return left.shape == right.shape and mx.abs(left - right).max().item() <= tolerance


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("bias", [None, normal(16, seed=8)], ids=["plain", "biased"])
def test_the_layout_for_a_cpu_equals_the_stack(num_rows, bias):
    """Another layout of gate and up changes nothing, and holds no more memory."""
    gate, up = Linear(Dense(normal(16, 8, seed=1)), bias), Linear(Dense(normal(16, 8, seed=2)), bias)
    down, x = Linear(Dense(normal(8, 16, seed=3))), normal(num_rows, 3, 8, seed=4)
    stacked, columns = (
        FeedForward.from_parts(gate, up, down, activation="silu", on_gpu=on_gpu) for on_gpu in (True, False)
    )
    assert isinstance(columns.gate_up, GateUpColumns)
    assert close(stacked(x), columns(x), 1e-5)
    assert sum(array.nbytes for array in stacked.arrays()) == sum(array.nbytes for array in columns.arrays())


def test_blocks_equal_their_formulas():
    """Slow, obvious references, with and without a gate."""
    gate, up, down = normal(16, 8, seed=1), normal(16, 8, seed=2), normal(8, 16, seed=3)
    x = normal(1, 2, 8, seed=4)
    parts = [Linear(Dense(matrix)) for matrix in (gate, up, down)]
    gated = FeedForward.from_parts(*parts, activation="silu", on_gpu=False)
    projected = x @ gate.T
    assert close(gated(x), (projected / (1 + mx.exp(-projected)) * (x @ up.T)) @ down.T)
    plain = PlainFeedForward(parts[1], parts[2], gelu)
    assert close(plain(x), nn.gelu(x @ up.T) @ down.T)


@pytest.mark.parametrize(("name", "expected"), [("silu", nn.silu), ("gelu", nn.gelu), ("gelu_tanh", nn.gelu_approx)])
def test_activations_equal_mlx(name, expected):
    """Every activation is the function that its name promises."""
    x = mx.linspace(-12, 12, 4001)
    assert close(activation_of(name)(x), expected(x), 4e-6)
