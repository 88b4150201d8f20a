"""Layouts for a CPU: the same products, the same rows, the same memory."""

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_models.cpu_layout import Blocks, Columns, gate_up_for_cpu, head_for_cpu, projection_for_cpu
from headrace_models.layers import Dense, Linear, SplitLinear


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def close(left: mx.array, right: mx.array) -> bool:
    return left.shape == right.shape and mx.abs(left - right).max().item() < 1e-4


@given(
    num_rows=st.sampled_from([1, 3, 4, 5, 32, 33]),
    num_tokens=st.sampled_from([1, 2]),
    sizes=st.sampled_from([(384, 16), (256, 8), (640, 24)]),
)
def test_a_head_in_blocks_is_the_same_product(num_rows, num_tokens, sizes):
    """Any number of rows, below, in and above the blocked range; rows are looked up as before."""
    matrix, x = normal(*sizes), normal(num_rows, num_tokens, sizes[1], seed=1)
    head = head_for_cpu(Dense(matrix))
    assert isinstance(head, Blocks)
    assert head.num_rows == sizes[0]
    assert close(head.project(x), x @ matrix.T)
    ids = mx.array([[3, 0], [sizes[0] - 1, 3]])
    assert mx.array_equal(head.take(ids), matrix[ids]).item()
    assert sum(array.nbytes for array in head.arrays()) == matrix.nbytes


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 8), (5, 8)])
@pytest.mark.parametrize("bias", [None, normal(24, seed=2)], ids=["plain", "biased"])
def test_a_wide_projection_is_the_same_product(shape, bias):
    """Stored transposed; its rows are still those of the matrix."""
    linear, x = Linear(Dense(normal(24, 8)), bias), normal(*shape, seed=1)
    found = projection_for_cpu(linear)
    assert isinstance(found.weight, Columns)
    assert found.weight.num_rows == 24
    assert close(found(x), linear(x))
    ids = mx.array([[1, 23, 0]])
    assert mx.array_equal(found.weight.take(ids), linear.weight.take(ids)).item()


def test_what_is_not_wide_plain_float32_stays():
    """Tall and 16-bit matrices, split projections, and vocabularies without a block size keep their form."""
    tall, half = Linear(Dense(normal(8, 24))), Linear(Dense(normal(24, 8).astype(mx.bfloat16)))
    split = SplitLinear((tall, tall))
    assert [projection_for_cpu(each) for each in (tall, half, split)] == [tall, half, split]
    assert gate_up_for_cpu(half) is None
    assert gate_up_for_cpu(split) is None
    assert head_for_cpu(half.weight) is half.weight
    odd = Dense(normal(383, 8))
    assert head_for_cpu(odd) is odd
