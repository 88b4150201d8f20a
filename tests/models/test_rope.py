"""Rope: the angles of a step equal MLX's fused kernel, and scaling equals its definition."""

import math

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_models.errors import UnsupportedArchitecture
from headrace_models.rope import AngleRope, FusedRope
from headrace_models.rope_scaling import rope_angles

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "type": "su",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + index for index in range(8)],
}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
SCALINGS = [None, {"rope_type": "default"}, {"type": "linear", "factor": 4.0}, LLAMA3, YARN, LONGROPE, PROPORTIONAL]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("offset", [0, 9, [3, 40]])
def test_angles_equal_the_fused_kernel(scaling, num_tokens, offset):
    """Both forms rotate alike, for one offset and for one per row, within float32 rounding of the angles."""
    angles = rope_angles(16, 10000.0, scaling, max_positions=128)
    heads = mx.random.normal((2, 3, num_tokens, 16), key=mx.random.key(0))
    where = mx.array(offset, dtype=mx.int32) if isinstance(offset, list) else offset
    rotated = [form.from_angles(angles).at(where, num_tokens, mx.float32)(heads) for form in (AngleRope, FusedRope)]
    assert mx.abs(rotated[0] - rotated[1]).max().item() < 2e-5


@pytest.mark.parametrize("is_traditional", [False, True])
@pytest.mark.parametrize("head_size", [8, 12])
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("offset", [9, [3, 40]])
@pytest.mark.parametrize("scaling", [None, YARN])
def test_pairs_of_neighbours_and_parts_of_heads(is_traditional, head_size, num_tokens, offset, scaling):
    """Traditional and partial ropes rotate alike in both forms; components past the rotated ones pass unchanged."""
    angles = rope_angles(8, 10000.0, scaling)
    heads = mx.random.normal((2, 3, num_tokens, head_size), key=mx.random.key(0))
    where = mx.array(offset, dtype=mx.int32) if isinstance(offset, list) else offset
    rotated = [
        form.from_angles(angles, is_traditional=is_traditional).at(where, num_tokens, mx.float32)(heads)
        for form in (AngleRope, FusedRope)
    ]
    assert mx.abs(rotated[0] - rotated[1]).max().item() < 2e-5
    assert mx.array_equal(rotated[0][..., 8:], heads[..., 8:]).item()


@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_one_position_is_rotated_as_it_is_among_others(num_rows):
    """A step of one position rotates as a slice does; many rows, whose matrices would be large, too."""
    rope = AngleRope.from_angles(rope_angles(64, 10000.0))
    heads = mx.random.normal((num_rows, 3, 5, 64), key=mx.random.key(0))
    offsets = mx.arange(num_rows, dtype=mx.int32) * 7
    together = rope.at(offsets, 5, mx.float32)(heads)
    for position in range(5):
        alone = rope.at(offsets + position, 1, mx.float32)(heads[:, :, position : position + 1])
        assert mx.allclose(alone, together[:, :, position : position + 1], rtol=1e-5, atol=1e-6)


def test_yarn_keeps_short_waves_and_divides_long_ones():
    """Between the two it blends; queries and keys grow by the logarithm of the factor, or as the checkpoint says."""
    plain, scaled = rope_angles(64, 10000.0), rope_angles(64, 10000.0, YARN)
    ratios = [before / after for before, after in zip(plain.frequencies, scaled.frequencies, strict=True)]
    assert ratios == sorted(ratios)
    assert ratios[0] == 1
    assert math.isclose(ratios[-1], 4.0)
    assert math.isclose(scaled.magnitude, 0.1 * math.log(4) + 1)
    assert rope_angles(64, 10000.0, YARN | {"attention_factor": 1.5}).magnitude == 1.5


def test_longrope_takes_long_factors_where_the_context_exceeds_the_original_one():
    """Each frequency has a divisor of its own; the magnitude grows with the context."""
    plain = rope_angles(16, 10000.0).frequencies
    short, long = (rope_angles(16, 10000.0, LONGROPE, max_positions=positions) for positions in (64, 256))
    assert (short.frequencies, short.magnitude) == (plain, 1.0)
    assert long.frequencies == [frequency / (1 + index) for index, frequency in enumerate(plain)]
    assert math.isclose(long.magnitude, math.sqrt(1 + math.log(4) / math.log(64)))


def test_bfloat16_stays_bfloat16_and_equals_the_fused_kernel():
    """Angles are computed in float32 and applied in the heads' dtype, as the kernel does on CPU."""
    heads = mx.random.normal((2, 3, 4, 16), key=mx.random.key(0)).astype(mx.bfloat16)
    angles = rope_angles(16, 10000.0)
    rotated = AngleRope.from_angles(angles).at(7, 4, mx.bfloat16)(heads)
    kernel = FusedRope.from_angles(angles).at(7, 4, mx.bfloat16)(heads)
    assert rotated.dtype == mx.bfloat16
    # One unit in the last place of bfloat16 at magnitude 4.
    assert mx.abs(rotated - kernel).max().item() <= 2**-5


@settings(max_examples=20, deadline=None)
@given(base=st.integers(0, 500), gap=st.integers(0, 200))
def test_scores_depend_on_distance_alone(base, gap):
    """Rotating a query and a key by the same shift leaves their product unchanged."""
    rope = AngleRope.from_angles(rope_angles(8, 10000.0))
    query, key = mx.random.normal((2, 1, 1, 1, 8), key=mx.random.key(1))

    def score(shift: int) -> float:
        rotated = rope.at(shift + gap, 1, mx.float32)(query) * rope.at(shift, 1, mx.float32)(key)
        return rotated.sum().item()

    assert math.isclose(score(0), score(base), abs_tol=1e-3)


def test_plain_frequencies_are_the_powers_of_the_base():
    """Rounded as MLX's kernel rounds them, they are base^(-2i/D) to float32."""
    assert rope_angles(8, 10000.0).frequencies == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-6)


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    """Waves shorter than context / high keep their frequency, longer than context / low are divided by the factor."""
    plain = rope_angles(64, 10000.0).frequencies
    scaled = rope_angles(64, 10000.0, LLAMA3).frequencies
    for before, after in zip(plain, scaled, strict=True):
        turns = 64 * before / (2 * math.pi)
        if turns >= 4:
            assert after == before
        elif turns <= 1:
            assert math.isclose(after, before / 8)
        else:
            assert before / 8 <= after <= before


def test_proportional_turns_the_first_pairs_alone():
    """A quarter of a head of 16: two of eight pairs, at the frequencies that they have in a whole head."""
    plain, found = rope_angles(16, 10000.0).frequencies, rope_angles(16, 10000.0, PROPORTIONAL).frequencies
    assert found == [*plain[:2], *[0.0] * 6]


def test_factors_of_a_gguf_file_divide_the_frequencies():
    """A tensor of divisors replaces the scaling of the configuration."""
    assert rope_angles(4, 100.0, LLAMA3, factors=[1.0, 2.0]).frequencies == pytest.approx([1.0, 0.05])


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "longrope", "factor": 2.0}, "original_max_position_embeddings"),
        (LONGROPE | {"factor": 2.0, "long_factor": [1.0]}, "long_factor"),
        ({"rope_type": "yarn"}, "rope_scaling.factor"),
        ({"rope_type": "linear"}, "rope_scaling.factor"),
        ({"rope_type": "linear", "factor": 0}, "rope_scaling.factor"),
        ({"rope_type": "llama3", "factor": "8"}, "rope_scaling.factor"),
    ],
)
def test_unknown_scaling_is_refused_by_name(scaling, named):
    """A rope that is not known is an error that names the field or the type, never a plain rope."""
    with pytest.raises(UnsupportedArchitecture, match=named):
        rope_angles(16, 10000.0, scaling)
