"""Tone curves are monotone, keep the best token the best, and bring no impossible token back."""

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_sampling import HlgCurve, SamplingParams, ToneCurve, make_step_sampler
from headrace_sampling.tone import apply_hlg, apply_tone

PERCENT = st.floats(1e-4, 100)
HLG = st.builds(
    HlgCurve,
    pivot=st.sampled_from(["top", "entropy", "median"]),
    pivot_offset=st.floats(-5, 10),
    width=st.floats(0, 10),
    shoulder=st.just(0) | st.floats(0.1, 10),
    toe=st.just(0) | st.floats(0.1, 10),
)


@st.composite
def drawn_curves(draw):
    """Points whose wanted probabilities rise with the probabilities."""
    xs = draw(st.lists(PERCENT, min_size=2, max_size=6, unique_by=lambda x: round(float(np.log(x)), 2)))
    ys = sorted(draw(st.lists(PERCENT, min_size=len(xs), max_size=len(xs))))
    return ToneCurve(points=list(zip(sorted(xs), ys, strict=True)))


def sorted_logprobs(seed):
    random = np.random.default_rng(seed)
    logits = np.sort(random.normal(size=400) * random.uniform(0.1, 8)).astype(np.float32)
    logits[:5] = -np.inf
    row = mx.array(logits[None])
    return row - mx.logsumexp(row, axis=-1, keepdims=True)


def check(scores, logprobs):
    values, inputs = np.array(scores)[0].astype(np.float64), np.array(logprobs)[0]
    assert np.isinf(values[np.isinf(inputs)]).all()
    finite = values[np.isfinite(inputs)]
    assert np.isfinite(finite).all()
    # Steps down only by rounding of float32.
    assert np.diff(finite).min() >= -1e-4 * max(1.0, np.abs(finite).max())
    assert finite[-1] >= finite.max() - 1e-4 * max(1.0, np.abs(finite).max())


@settings(max_examples=40, deadline=None)
@given(HLG, st.integers(0, 2**31))
def test_hlg_is_monotone(curve, seed):
    """Whatever its ends and its pivot."""
    logprobs = sorted_logprobs(seed)
    check(apply_hlg(logprobs, curve, 0.7), logprobs)


@settings(max_examples=40, deadline=None)
@given(drawn_curves(), st.integers(0, 2**31))
def test_a_drawn_curve_is_monotone(curve, seed):
    """Between its points as well as beyond them."""
    logprobs = sorted_logprobs(seed)
    check(apply_tone(logprobs, curve), logprobs)


@settings(max_examples=30, deadline=None)
@given(drawn_curves())
def test_a_drawn_curve_meets_its_points(curve):
    """At each control point the score is the logarithm of what is wanted there."""
    points = np.array(curve.points)
    scores = apply_tone(mx.array(np.log(points[:, 0] / 100)[None].astype(np.float32)), curve)
    steepness = max(1.0, *(slope for _, _, slope in curve.knots))
    np.testing.assert_allclose(np.array(scores)[0], np.log(points[:, 1] / 100), atol=1e-4 * steepness, rtol=1e-4)


def test_hlg_without_ends_is_the_temperature():
    """The same operation, so the same numbers up to the constant of the pivot."""
    logprobs = sorted_logprobs(0)
    straight = apply_hlg(logprobs, HlgCurve(shoulder=0, toe=0), 2.0)
    shifted = np.array(straight - mx.max(straight))[0, 5:]
    np.testing.assert_allclose(shifted, np.array(2 * (logprobs - mx.max(logprobs)))[0, 5:], atol=1e-4)


def test_a_curve_draws_at_temperature_zero_and_hlg_does_not():
    """A drawn curve comes first, greedy second, HLG third."""
    logits = mx.array([[0.0, 0.1, 0.2, 0.0]])
    curve = make_step_sampler(SamplingParams(curve=ToneCurve(points=[(1, 1), (50, 50)]), seed=1))
    hlg = make_step_sampler(SamplingParams(hlg=HlgCurve(), seed=1))
    assert len({curve.sample(logits, step).item() for step in range(40)}) > 1
    assert {hlg.sample(logits, step).item() for step in range(40)} == {2}
