"""Layers: fused equals apart, packed equals dequantized, norms equal their formulas."""

import mlx.core as mx
import pytest

from headrace_models.errors import WeightMismatch
from headrace_models.layers import (
    Dense,
    Embedding,
    LayerNorm,
    Linear,
    Norm,
    Packed,
    SplitLinear,
    fuse,
)


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def packed(rows: int, columns: int, *, bits: int = 4, group_size: int = 32, seed: int = 0) -> Packed:
    return Packed(*mx.quantize(normal(rows, columns, seed=seed), group_size=group_size, bits=bits), bits, group_size)


def close(left: mx.array, right: mx.array, tolerance: float = 1e-4) -> bool:
    return left.shape == right.shape and mx.abs(left - right).max().item() <= tolerance


@pytest.mark.parametrize(
    "make",
    [lambda rows, seed: Dense(normal(rows, 64, seed=seed)), lambda rows, seed: packed(rows, 64, seed=seed)],
    ids=["dense", "packed"],
)
def test_fused_projections_equal_the_parts(make):
    """One product with stacked rows gives the outputs of the parts side by side, packed or not."""
    parts = [Linear(make(rows, seed), normal(rows, seed=9)) for seed, rows in enumerate((8, 4, 4))]
    fused = fuse(parts)
    x = normal(2, 3, 64, seed=5)
    assert isinstance(fused, Linear)
    assert close(fused(x), mx.concatenate([part(x) for part in parts], axis=-1))


def test_different_packings_are_not_stacked_but_still_agree():
    """Parts whose bits or groups differ stay apart behind the same call."""
    parts = [Linear(packed(8, 64)), Linear(packed(8, 64, bits=8, group_size=64)), Linear(Dense(normal(4, 64)))]
    fused = fuse(parts)
    x = normal(1, 1, 64)
    assert isinstance(fused, SplitLinear)
    assert close(fused(x), mx.concatenate([part(x) for part in parts], axis=-1))
    assert sum(array.nbytes for array in fused.arrays()) == sum(a.nbytes for part in parts for a in part.arrays())


def test_a_bias_on_some_parts_only_is_refused():
    """Stacking must not invent a bias."""
    with pytest.raises(WeightMismatch, match="1 of 2"):
        fuse([Linear(Dense(normal(4, 8)), normal(4)), Linear(Dense(normal(4, 8)))])


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 64), (8, 32), (2, 64), (6, 64)])
def test_packed_equals_its_dequantized_matrix(bits, group_size):
    """Products and rows of a packed matrix are those of the matrix it stands for."""
    weight = packed(16, 128, bits=bits, group_size=group_size)
    matrix = Dense(weight.dequantize(mx.float32))
    x, ids = normal(2, 1, 128, seed=3), mx.array([[0, 15], [7, 7]])
    assert close(weight.project(x), matrix.project(x), 1e-3)
    assert close(Embedding(weight)(ids), Embedding(matrix)(ids), 1e-6)
    assert weight.num_rows == matrix.num_rows == 16


def test_scales_follow_the_activations():
    """A bfloat16 checkpoint run with float32 activations gives float32 outputs."""
    weight = packed(16, 64).with_activations(mx.bfloat16)
    assert weight.project(normal(1, 64).astype(mx.bfloat16)).dtype == mx.bfloat16
    assert weight.with_activations(mx.float32).project(normal(1, 64)).dtype == mx.float32


def test_norms_equal_their_formulas():
    """Slow, obvious references."""
    gain, bias, x = normal(8, seed=6), normal(8, seed=7), normal(1, 2, 8, seed=4)
    assert close(Norm(gain, 1e-5)(x), x / mx.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gain)
    centred = x - x.mean(-1, keepdims=True)
    expected = centred / mx.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * gain + bias
    assert close(LayerNorm(gain, bias, 1e-5)(x), expected)


def test_a_scaled_embedding_scores_unscaled():
    """The factor belongs to the lookup; the tied head is the matrix itself."""
    embedding, ids, hidden = Embedding(Dense(normal(4, 8)), 3.0), mx.array([[1, 2]]), normal(1, 1, 8, seed=2)
    plain = Embedding(Dense(normal(4, 8)))
    assert close(embedding(ids), plain(ids) * 3)
    assert close(embedding.project(hidden), plain.project(hidden))
