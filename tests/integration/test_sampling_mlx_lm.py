"""Headrace's filters, processors and samplers beside mlx-lm's: the same tokens are kept, and its loops take ours."""

import math

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import llama
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc
from mlx_lm.sample_utils import make_logits_processors as make_their_processors
from mlx_lm.sample_utils import make_sampler as make_their_sampler

from headrace_sampling import (
    BatchSampler,
    InvalidSamplingParams,
    SamplingParams,
    create_row_sampling,
    drop_top_choices,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    make_logits_processors,
    make_sampler,
    make_step_sampler,
)


def log_probabilities(seed, num_rows=4, vocab_size=3000):
    random = np.random.default_rng(seed)
    logits = mx.array(random.normal(size=(num_rows, vocab_size)).astype(np.float32) * 3)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def column(value):
    return mx.full((4, 1), value, mx.float32)


@pytest.fixture(scope="module")
def model():
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=1,
        intermediate_size=64,
        num_attention_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=97,
    )
    mx.random.seed(0)
    return llama.Model(arguments)


@pytest.mark.parametrize("share", [0.4, 0.99])
def test_filters_keep_what_mlx_lm_keeps(share):
    """Equal arrays; of top-p one token per row may differ, because float32 sums from the other end round apart."""
    top_k = int(share * 100)
    for scores in map(log_probabilities, range(4)):
        kept, own = keep_top_p(scores, column(share)), apply_top_p(scores, share)
        assert mx.sum(kept != own, axis=-1).max().item() <= 1
        log_share = column(math.log(share))
        assert mx.array_equal(keep_min_p(scores, log_share), apply_min_p(scores, share))
        assert mx.array_equal(keep_min_p(scores, log_share, 7), apply_min_p(scores, share, 7))
        assert mx.array_equal(keep_top_k(scores, top_k), apply_top_k(scores, top_k))


@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.1, 0.5])
def test_xtc_drops_what_mlx_lm_drops(threshold):
    """At probability 1, with and without exempt tokens."""
    log_threshold = column(math.log(threshold) if threshold else -math.inf)
    for scores in map(log_probabilities, range(4)):
        exempt = [1, int(mx.argmax(scores[0]).item())]
        marks = mx.broadcast_to((mx.arange(3000) == exempt[0]) | (mx.arange(3000) == exempt[1]), scores.shape)
        assert mx.array_equal(drop_top_choices(scores, log_threshold), apply_xtc(scores, 1.0, threshold, []))
        assert mx.array_equal(drop_top_choices(scores, log_threshold, marks), apply_xtc(scores, 1.0, threshold, exempt))


@pytest.mark.parametrize(
    "keywords",
    [
        {"top_p": 0.6},
        {"top_p": 0.9, "min_p": 0.05, "top_k": 12},
        {"min_p": 0.1, "min_tokens_to_keep": 6},
        {"top_k": 3},
        {"top_p": 0.95, "xtc_probability": 1.0, "xtc_threshold": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab_size", [60, 3000])
def test_samplers_draw_from_the_set_that_mlx_lm_draws_from(keywords, vocab_size):
    """Hot draws of both reach the same tokens: all of a small set, none outside it."""
    scores = log_probabilities(5, 1, vocab_size)
    many = mx.broadcast_to(scores, (4000, vocab_size))
    mx.random.seed(1)
    theirs = set(make_their_sampler(temp=3.0, **keywords)(many).tolist())
    ours = set(make_sampler(SamplingParams(temperature=3.0, seed=2, **keywords))(many).tolist())
    assert ours == theirs


@pytest.mark.parametrize("window", [0, 1, 5, 20])
def test_processors_equal_mlx_lms(window):
    """Bit for bit in float32, over growing histories with repeats, prompt included."""
    keywords = {
        "logit_bias": {3: 2.5, 40: -7.0},
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.25,
        **{f"{name}_context_size": window for name in ("repetition", "presence", "frequency")},
    }
    ours, theirs = make_logits_processors(**keywords), make_their_processors(**keywords)
    assert len(ours) == len(theirs) == 4
    random = np.random.default_rng(window)
    for length in (1, 2, 7, 40):
        tokens = mx.array(random.integers(0, 30, length))
        logits = mx.array(random.normal(size=(1, 50)).astype(np.float32))
        for mine, their in zip(ours, theirs, strict=True):
            expected = their(tokens, mx.array(logits))
            untouched = mx.array(np.array(logits))
            result = mine(tokens, logits)
            assert mx.allclose(result, expected, rtol=0, atol=1e-6)
            assert mx.array_equal(logits, untouched)
            logits = expected


def test_the_step_contract_equals_mlx_lms_processors():
    """The engine's own path with mlx-lm's windows picks mlx-lm's greedy tokens when the prompt is empty."""
    params = SamplingParams(
        repetition_penalty=1.4,
        presence_penalty=0.8,
        presence_window=20,
        frequency_penalty=0.3,
        frequency_window=20,
    )
    processors = make_their_processors(repetition_penalty=1.4, presence_penalty=0.8, frequency_penalty=0.3)
    random, row, batch, tokens = np.random.default_rng(2), create_row_sampling(make_step_sampler(params)), None, []
    batch = BatchSampler()
    for _ in range(60):
        logits = mx.array(random.normal(size=(1, 12)).astype(np.float32))
        expected = mx.array(np.array(logits))
        for processor in processors:
            expected = processor(mx.array(tokens), expected) if tokens else expected
        token = batch.sample(logits, [row]).tokens.item()
        assert expected[0, token].item() >= mx.max(expected).item() - 1e-5
        tokens.append(token)


def test_values_that_kill_mlx_lms_server_are_refused_or_neutral():
    """Top-k of V or more keeps all; a threshold or a bias out of range is a typed error."""
    logits = log_probabilities(0, 1, 50)
    assert make_sampler(temp=1.0, top_k=50)(logits).shape == (1,)
    with pytest.raises(InvalidSamplingParams, match="xtc_threshold"):
        make_sampler(temp=1.0, xtc_probability=0.5, xtc_threshold=0.6)
    with pytest.raises(InvalidSamplingParams, match="0 to 49"):
        make_logits_processors({50: 1.0})[0](mx.array([1]), logits)


def test_mlx_lms_loop_takes_our_sampler_and_processors(model):
    """`generate_step`: greedy equals mlx-lm's own, penalties included; a seed replays, another one differs."""

    def tokens(sampler, processors=None):
        steps = generate_step(mx.arange(8), model, max_tokens=16, sampler=sampler, logits_processors=processors)
        return [int(token) for token, _ in steps]

    assert tokens(make_sampler()) == tokens(None)
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {5: 1.0}}
    own, theirs = make_logits_processors(**penalties), make_their_processors(**penalties)
    assert tokens(make_sampler(), own) == tokens(None, theirs)
    seeded = SamplingParams(temperature=1.0, top_p=0.95, top_k=50, seed=8)
    assert tokens(make_sampler(seeded)) == tokens(make_sampler(seeded))
    assert tokens(make_sampler(seeded)) != tokens(make_sampler(SamplingParams(temperature=1.0, seed=9)))


def test_mlx_lms_batch_takes_our_samplers_and_processors(model):
    """`BatchGenerator` with a sampler and processors per row: each row is what the loop gives it alone."""
    prompts = [list(range(8)), [5, 4, 3], [9] * 5]
    params = [SamplingParams(), *(SamplingParams(temperature=1.0, top_p=0.9, seed=seed) for seed in (1, 2))]

    def processors(row):
        return make_logits_processors(repetition_penalty=1.3) if row else []

    generator = BatchGenerator(model, max_tokens=12)
    uids = generator.insert(
        prompts,
        samplers=[make_sampler(entry) for entry in params],
        logits_processors=[processors(row) for row in range(3)],
    )
    batched = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            batched[response.uid].append(response.token)
    generator.close()
    for row, uid in enumerate(uids):
        steps = generate_step(
            mx.array(prompts[row]),
            model,
            max_tokens=12,
            sampler=make_sampler(params[row]),
            logits_processors=processors(row),
        )
        assert batched[uid] == [int(token) for token, _ in steps]
