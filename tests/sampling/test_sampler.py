"""One row's sampler: reproducible, fairly drawn, and in mlx-lm's shape."""

import math

import mlx.core as mx
import numpy as np
import pytest

from headrace_sampling import (
    InvalidSamplingParams,
    SamplingParams,
    create_row_sampling,
    make_sampler,
    make_step_sampler,
)


def draws(params, logits, count, first=0):
    sampler = make_step_sampler(params)
    return [token.item() for token in [sampler.sample(logits, step) for step in range(first, first + count)]]


def test_the_same_seed_and_step_give_the_same_token():
    """A token depends on logits, seed and step, not on what was sampled before or by whom."""
    logits = mx.array(np.random.default_rng(0).normal(size=(1, 500)).astype(np.float32))
    params = SamplingParams(temperature=1.0, seed=42)
    whole = draws(params, logits, 40)
    assert draws(params, logits, 20, first=20) == whole[20:]
    assert draws(SamplingParams(temperature=1.0, seed=43), logits, 40) != whole


def test_rows_without_a_seed_differ():
    """Two equal requests get different randomness."""
    logits = mx.zeros((1, 10_000))
    params = SamplingParams(temperature=1.0)
    assert draws(params, logits, 5) != draws(params, logits, 5)


def test_draws_follow_the_distribution():
    """Over 4,000 steps each frequency is within five standard deviations of softmax(logits / temperature)."""
    logits, temperature, count = np.array([2.0, 1.0, 0.0, -1.0, -3.0]), 0.8, 4000
    expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    sampler = make_step_sampler(SamplingParams(temperature=temperature, seed=5))
    row = mx.array(logits[None], mx.float32)
    tokens = mx.concatenate([sampler.sample(row, step) for step in range(count)])
    observed = np.bincount(np.array(tokens), minlength=5) / count
    assert np.all(np.abs(observed - expected) <= 5 * np.sqrt(expected * (1 - expected) / count))


def test_filters_bound_what_is_drawn():
    """Over 200 steps only kept tokens appear, and more than one of them."""
    logits = mx.array([[3.0, 2.5, 2.0, 1.5, -1.0]])
    for filters, allowed in [({"top_k": 2}, {0, 1}), ({"top_p": 0.6}, {0, 1}), ({"min_p": 0.3}, {0, 1, 2})]:
        assert set(draws(SamplingParams(temperature=2.0, seed=1, **filters), logits, 200)) == allowed


def test_greedy_is_the_argmax_after_the_bias():
    """Temperature 0 ignores every filter; the bias counts, also below the resolution of half precision."""
    logits = mx.array([[8.0, 8.0, 1.0]], mx.bfloat16)
    assert draws(SamplingParams(top_k=1, top_p=0.1, min_p=1.0), logits, 1) == [0]
    assert draws(SamplingParams(logit_bias={1: 0.001}), logits, 1) == [1]
    assert draws(SamplingParams(logit_bias={2: 100.0}), logits, 1) == [2]
    assert make_step_sampler(SamplingParams()).is_plain_greedy
    assert not make_step_sampler(SamplingParams(logit_bias={1: 1.0})).is_plain_greedy


def test_a_cold_temperature_becomes_greedy():
    """The smallest temperatures neither divide by zero nor overflow."""
    logits = mx.array([[1.0, 1.5, 1.25, -math.inf]])
    for temperature in (5e-324, 1e-30, 1e-6):
        assert draws(SamplingParams(temperature=temperature, seed=3), logits, 5) == [1] * 5


def test_a_row_advances_once_per_sampled_or_skipped_token():
    """Known tokens move the step on, so that a resumed row draws what it would have drawn."""
    logits = mx.zeros((1, 1000))
    sampler = make_step_sampler(SamplingParams(temperature=1.0, seed=9))
    whole = create_row_sampling(sampler)
    tokens = [whole.sample(logits).item() for _ in range(6)]
    resumed = create_row_sampling(sampler, first_step=2)
    assert resumed.sample(logits).item() == tokens[2]
    resumed.skip(2)
    assert (resumed.sample(logits).item(), resumed.step) == (tokens[5], 6)


@pytest.mark.parametrize("answer", [None, True, 0, False])
def test_only_false_itself_stops_a_row(answer):
    """A sink that returns nothing, or a falsy count, goes on (ruling P-34)."""
    seen = []
    row = create_row_sampling(make_step_sampler(SamplingParams()), lambda token, logprobs: seen.append(token) or answer)
    assert row.emit(7) is (answer is not False)
    assert seen == [7]
    assert create_row_sampling(make_step_sampler(SamplingParams())).emit(7)


def test_mlx_lm_shape_equals_the_step_sampler():
    """One row is the step sampler step by step; more rows draw apart; keywords and parameters exclude each other."""
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=11)
    logits = mx.array(np.random.default_rng(1).normal(size=(1, 300)).astype(np.float32))
    sampler = make_sampler(params)
    assert [sampler(logits).item() for _ in range(10)] == draws(params, logits, 10)
    assert len(set(make_sampler(params)(mx.zeros((16, 5000))).tolist())) > 10
    assert make_sampler(temp=0.0)(logits).tolist() == [mx.argmax(logits).item()]
    assert make_sampler(top_k=3, min_p=0.1, temp=0.5)(logits).shape == (1,)
    with pytest.raises(InvalidSamplingParams, match="alone"):
        make_sampler(params, temp=0.5)
    with pytest.raises(InvalidSamplingParams, match="temperature"):
        make_sampler(temp=-1)
