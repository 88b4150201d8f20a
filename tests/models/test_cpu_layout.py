"""Layouts for a CPU: the same products, the same rows, the same memory."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_models.cpu_layout import (
    Blocks,
    Columns,
    GateUpApart,
    fuse_for_cpu,
    gate_up_for_cpu,
    head_for_cpu,
    stacked_for_cpu,
)
from headrace_models.errors import WeightMismatch
from headrace_models.feed_forward import FeedForward
from headrace_models.layers import Dense, Linear, Packed, SplitLinear, fuse


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def close(left: mx.array, right: mx.array) -> bool:
    return left.shape == right.shape and mx.abs(left - right).max().item() < 1e-4


@given(
    num_rows=st.sampled_from([1, 3, 4, 5, 32, 33]),
    num_tokens=st.sampled_from([1, 2]),
    sizes=st.sampled_from([(384, 16), (256, 8), (640, 24), (193, 8), (515, 16)]),
)
def test_a_head_in_blocks_is_the_same_product(num_rows, num_tokens, sizes):
    """Any number of rows, below, in and above the blocked range, with and without a rest; rows are looked up."""
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
    found = fuse_for_cpu([linear])
    assert isinstance(found.weight, Columns)
    assert found.weight.num_rows == 24
    assert close(found(x), linear(x))
    ids = mx.array([[1, 23, 0]])
    assert mx.array_equal(found.weight.take(ids), linear.weight.take(ids)).item()


@pytest.mark.parametrize("is_biased", [False, True])
def test_columns_of_several_matrices_are_those_of_their_stack(is_biased):
    """Bit for bit, in order, whatever their numbers of rows; no view of anything larger is kept."""
    parts = [
        Linear(Dense(normal(rows, 12, seed=rows)), normal(rows, seed=7) if is_biased else None) for rows in (16, 4, 4)
    ]
    found, stacked = fuse_for_cpu(parts), fuse(parts)
    assert mx.array_equal(found.weight.matrix, stacked.weight.matrix.T)
    assert found.bias is stacked.bias is None or mx.array_equal(found.bias, stacked.bias)
    mx.eval(found.weight.matrix)
    assert np.array(found.weight.matrix, copy=False).flags.c_contiguous


@pytest.mark.parametrize("is_biased", [False, True])
def test_gate_and_up_are_the_same_apart_and_stacked(is_biased):
    """A checkpoint may have one matrix or two."""
    gate, up = (Linear(Dense(normal(8, 12, seed=row)), normal(8, seed=9) if is_biased else None) for row in (1, 2))
    apart, stacked = gate_up_for_cpu(gate, up), stacked_for_cpu(fuse([gate, up]))
    assert all(mx.array_equal(*pair) for pair in zip(apart.arrays(), stacked.arrays(), strict=True))


def half(rows: int, seed: int, *, is_biased: bool = False) -> Linear:
    matrix, bias = (normal(*shape, seed=seed).astype(mx.bfloat16) for shape in ((rows, 64), (rows,)))
    return Linear(Dense(matrix), bias if is_biased else None)


def packed(rows: int, seed: int) -> Linear:
    return Linear(Packed(*mx.quantize(normal(rows, 64, seed=seed), 32, 4), 4, 32))


@pytest.mark.parametrize(
    "parts",
    [[half(8, 1), half(8, 2)], [half(8, 1, is_biased=True), half(8, 2, is_biased=True)], [packed(8, 1), packed(8, 2)]],
    ids=["plain", "biased", "packed"],
)
def test_all_but_float32_stays_apart(parts):
    """Nothing is copied, and the products are those of the stack."""
    dtype = mx.float32 if isinstance(parts[0].weight, Packed) else mx.bfloat16
    x = normal(2, 3, 64, seed=1).astype(dtype)
    apart, gate_up, stacked = fuse_for_cpu(parts), gate_up_for_cpu(*parts), fuse(parts)
    assert isinstance(apart, SplitLinear)
    assert isinstance(gate_up, GateUpApart)
    assert mx.array_equal(apart(x), stacked(x))
    assert mx.array_equal(mx.concatenate(gate_up.pair(x), axis=-1), stacked(x))
    kept = [id(array) for part in parts for array in part.arrays()]
    assert [id(array) for array in gate_up.arrays()] == [id(array) for array in apart.arrays()] == kept
    assert fuse_for_cpu(parts[:1]) is parts[0]


def test_biases_of_some_parts_alone_are_refused():
    """Apart or not, a checkpoint that lost one is an error."""
    parts = [half(8, 1), half(8, 2, is_biased=True)]
    with pytest.raises(WeightMismatch, match="1 of 2"):
        fuse_for_cpu(parts)
    with pytest.raises(WeightMismatch, match="1 of 2"):
        FeedForward.from_parts(*parts, packed(64, 3), activation="silu", on_gpu=False)


def test_what_is_not_wide_plain_float32_has_no_columns():
    """Tall and 16-bit matrices, and vocabularies smaller than a block keep their form."""
    assert isinstance(fuse_for_cpu([Linear(Dense(normal(8, 24)))]).weight, Dense)
    assert stacked_for_cpu(half(8, 1)) is None
    assert head_for_cpu(half(384, 1).weight).matrix.dtype == mx.bfloat16
    small = Dense(normal(127, 8))
    assert head_for_cpu(small) is small
