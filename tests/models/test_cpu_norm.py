"""The norm of decode steps on a CPU against MLX's own."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_models.cpu_norm import ProductNorm, norm_for_cpu
from headrace_models.layers import Norm


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from([(1, 1), (5, 1), (1, 4), (3, 2)]),
    size=st.sampled_from([1, 7, 576]),
    magnitude=st.sampled_from([0.0, 1e-4, 1.0, 1e4]),
)
def test_equals_mlx(shape, size, magnitude):
    """Rows and positions of any number and size are normed as MLX norms them."""
    keys = mx.random.key(0), mx.random.key(1)
    x = magnitude * mx.random.normal((*shape, size), key=keys[0])
    gain = mx.random.normal((size,), key=keys[1])
    assert mx.allclose(norm_for_cpu(gain, 1e-5)(x), mx.fast.rms_norm(x, gain, 1e-5), rtol=1e-5, atol=1e-6)


def test_a_row_among_others_equals_the_row_alone():
    """Each row is a product of its own."""
    x = mx.random.normal((6, 1, 64), key=mx.random.key(0))
    norm = norm_for_cpu(mx.ones(64), 1e-5)
    assert mx.array_equal(norm(x), mx.concatenate([norm(row[None]) for row in x]))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_keeps_the_kernel(dtype):
    """Gains or activations of half precision are normed by MLX, which adds up in float32."""
    gain, x = mx.ones(64, dtype), mx.random.normal((2, 1, 64), key=mx.random.key(0)).astype(dtype)
    assert isinstance(norm_for_cpu(gain, 1e-5), Norm)
    mixed = ProductNorm(gain.astype(mx.float32), 1e-5)(x)
    assert mx.array_equal(mixed, mx.fast.rms_norm(x, gain.astype(mx.float32), 1e-5))


def test_its_weights_are_the_gain():
    """What a load evaluates and counts is the gain, in the form that steps use."""
    [array] = norm_for_cpu(mx.ones(64), 1e-5).arrays()
    assert array.nbytes == 4 * 64
