"""Many rows at once equal each row alone, bit for bit."""

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_sampling import (
    BatchMismatch,
    BatchSampler,
    HlgCurve,
    InvalidSamplingParams,
    SamplingParams,
    ToneCurve,
    create_row_sampling,
    make_step_sampler,
)

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 1e-300, 0.3, 0.7, 1.0, 5.0, 1e6]),
    top_p=st.sampled_from([0.0, 1e-12, 0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 40, 10**9, 2**70]),
    min_p=st.sampled_from([0.0, 1e-300, 0.05, 1.0]),
    min_tokens_to_keep=st.sampled_from([1, 3, 1024]),
    top_n_sigma=st.sampled_from([0.0, 0.0, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 0.4]),
    xtc_probability=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.1, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5, 1e4]),
    repetition_window=st.sampled_from([0, 2]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    dry_multiplier=st.sampled_from([0.0, 0.0, 1.0]),
    min_tokens=st.sampled_from([0, 5]),
    logprobs=st.sampled_from([None, None, 0, 20]),
    hlg=st.sampled_from([None, None, None, HlgCurve(), HlgCurve(pivot="median"), HlgCurve(pivot="entropy", toe=0)]),
    curve=st.sampled_from([None, None, None, ToneCurve(points=[(0.1, 0.05), (50, 80)])]),
    logit_bias=st.sampled_from([{}, {}, {0: 4.0}, {0: -1e30, 1: 1e30}]),
    seed=st.integers(-(2**63), 2**64 - 1),
)
DTYPES = st.sampled_from([mx.float32, mx.bfloat16, mx.float16])
ODD = [np.inf, -np.inf, np.nan, 0.0, 3.0e38, -3.0e38, 1e-45]


def logits_of(seed, num_rows, vocab_size, dtype=mx.float32):
    random = np.random.default_rng(seed)
    return mx.array(random.normal(size=(num_rows, vocab_size)).astype(np.float32) * 3).astype(dtype)


def sampler_of(params):
    return make_step_sampler(params, initial_history=[0, 1, 0, 7, 0, 1], eos_token_ids=[1])


def rows_of(params, steps=None):
    steps = steps or [0] * len(params)
    return [create_row_sampling(sampler_of(p), first_step=step) for p, step in zip(params, steps, strict=True)]


def alone(logits, params, steps):
    return [
        sampler_of(p).sample(logits[row : row + 1], step).item()
        for row, (p, step) in enumerate(zip(params, steps, strict=True))
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=32), st.integers(2, 400), DTYPES, st.integers(0, 2**31), st.data())
def test_a_batch_equals_its_rows_alone(params, vocab_size, dtype, seed, data):
    """Any mix of parameters, 1 to 32 rows, three dtypes, each row at its own step; every step advances by one."""
    steps = [data.draw(st.integers(0, 10**6)) for _ in params]
    logits = logits_of(seed, len(params), vocab_size, dtype)
    rows = rows_of(params, steps)
    tokens = BatchSampler().sample(logits, rows).tokens
    assert tokens.dtype == mx.int32
    assert tokens.tolist() == alone(logits, params, steps)
    assert [row.step for row in rows] == [step + 1 for step in steps]


@settings(max_examples=30, deadline=None)
@given(st.lists(PARAMS, min_size=2, max_size=8), st.randoms(use_true_random=False), st.integers(0, 2**31))
def test_neighbours_and_row_order_change_nothing(params, random, seed):
    """A shuffled and thinned batch gives each row the token that it had."""
    logits = logits_of(seed, len(params), 300)
    full = BatchSampler().sample(logits, rows_of(params)).tokens.tolist()
    chosen = random.sample(range(len(params)), random.randint(1, len(params)))
    part = BatchSampler().sample(logits[mx.array(chosen)], rows_of([params[row] for row in chosen])).tokens.tolist()
    assert part == [full[row] for row in chosen]


def test_one_batch_sampler_follows_changing_membership():
    """Rows join, leave and swap between steps; the laid-out parameters never go stale."""
    params = [
        SamplingParams(temperature=t, top_p=p, seed=i) for i, (t, p) in enumerate([(0, 1), (1, 0.5), (2, 1), (1, 0.9)])
    ]
    sampler, rows = BatchSampler(), rows_of(params)
    for step, members in enumerate([[0], [0, 1], [0, 1], [1, 0], [2, 3, 1], [3], [3], [0, 1, 2, 3]]):
        logits = logits_of(step, len(members), 97 if step < 6 else 61)
        expected = alone(logits, [params[m] for m in members], [rows[m].step for m in members])
        assert sampler.sample(logits, [rows[m] for m in members]).tokens.tolist() == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=4), DTYPES, st.data())
def test_no_logits_crash_and_every_token_is_in_the_vocabulary(params, dtype, data):
    """Infinite, NaN, all-equal and one-token logits give a token in range, the same one in a batch and alone."""
    vocab_size = data.draw(st.integers(1, 6))
    params = [attrs.evolve(p, logit_bias=tuple((i, b) for i, b in p.logit_bias if i < vocab_size)) for p in params]
    values = data.draw(st.lists(st.sampled_from(ODD), min_size=vocab_size, max_size=vocab_size))
    logits = mx.array([values] * len(params), mx.float32).astype(dtype)
    tokens = BatchSampler().sample(logits, rows_of(params)).tokens.tolist()
    assert all(0 <= token < vocab_size for token in tokens)
    assert tokens == alone(logits, params, [0] * len(params))


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1.0, 1e6])
def test_an_infinite_logit_wins(temperature):
    """The model is sure: so is every temperature."""
    logits = mx.array([[0.0, mx.inf, 5.0, -mx.inf]])
    rows = rows_of([SamplingParams(temperature=temperature, seed=1)])
    assert BatchSampler().sample(logits, rows).tokens.tolist() == [1]


def test_candidates_decide_as_the_sorted_vocabulary_does():
    """Rows peaked and flat, with and without reading: the same tokens, whatever the prefilter could decide."""
    random = np.random.default_rng(0)
    params = [
        SamplingParams(temperature=1.0, top_p=p, min_p=m, top_k=k, seed=i)
        for i, (p, m, k) in enumerate(
            [(0.5, 0, 0), (0.95, 0, 0), (0.95, 0.01, 0), (0.99, 0, 0), (0.9, 0, 2000), (0.9, 0, 50)]
        )
    ]
    for scale in (0.0, 0.01, 1.0, 4.0):
        for vocab_size in (40_000, 3_001, 1_500):
            logits = mx.array(random.normal(size=(6, vocab_size)).astype(np.float32) * scale)
            read, lazy = (
                BatchSampler(may_read=may_read).sample(logits, rows_of(params)).tokens.tolist()
                for may_read in (True, False)
            )
            assert read == lazy == alone(logits, params, [0] * 6)


def test_sampling_is_lazy():
    """A step is only enqueued: nothing is read from the device."""
    rows = rows_of([SamplingParams(temperature=1.0, seed=1), SamplingParams()])
    sampler = BatchSampler()
    first = sampler.sample(logits_of(0, 2, 50), rows).tokens
    second = sampler.sample(mx.zeros((2, 50)) + first[:, None], rows).tokens
    mx.async_eval(second)
    assert second.shape == (2,)


def test_one_sampler_per_row_is_required():
    """Too few or too many is a typed error, and no row advances."""
    rows = rows_of([SamplingParams()] * 2)
    for num_rows in (1, 3):
        with pytest.raises(BatchMismatch):
            BatchSampler().sample(mx.zeros((num_rows, 5)), rows)
    assert [row.step for row in rows] == [0, 0]


def test_a_bias_outside_the_vocabulary_is_refused():
    """At once if the size is known, else at the first step; no row advances."""
    params = SamplingParams(logit_bias={3: 1.0, 5: 1.0})
    with pytest.raises(InvalidSamplingParams, match="0 to 4"):
        make_step_sampler(params, vocab_size=5)
    rows = rows_of([SamplingParams(), params])
    with pytest.raises(InvalidSamplingParams, match="0 to 4"):
        BatchSampler().sample(mx.zeros((2, 5)), rows)
    assert [row.step for row in rows] == [0, 0]
    make_step_sampler(params, vocab_size=6)
