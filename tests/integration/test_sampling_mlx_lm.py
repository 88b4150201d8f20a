"""Headrace's filters and samplers beside mlx-lm's: the same tokens are kept, and its loop takes our sampler."""

import math

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from headrace_sampling import SamplingParams, keep_min_p, keep_top_k, keep_top_p, make_sampler


def log_probabilities(seed):
    logits = mx.array(np.random.default_rng(seed).normal(size=(4, 3000)).astype(np.float32) * 3)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def column(value):
    return mx.full((4, 1), value, mx.float32)


@pytest.mark.parametrize("share", [0.4, 0.99])
def test_filters_keep_what_mlx_lm_keeps(share):
    """Equal arrays; of top-p one token per row may differ, because float32 sums from the other end round apart."""
    top_k = int(share * 100)
    for scores in map(log_probabilities, range(4)):
        kept, own = keep_top_p(scores, column(share)), apply_top_p(scores, share)
        assert mx.sum(kept != own, axis=-1).max().item() <= 1
        assert mx.array_equal(keep_min_p(scores, column(math.log(share))), apply_min_p(scores, share))
        assert mx.array_equal(keep_top_k(scores, top_k), apply_top_k(scores, top_k))


def test_mlx_lms_loop_takes_our_sampler():
    """`generate_step(sampler=...)`: greedy equals mlx-lm's own; a seed replays, another one differs."""
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
    model = llama.Model(arguments)

    def tokens(sampler):
        steps = generate_step(mx.arange(8), model, max_tokens=16, sampler=sampler)
        return [int(token) for token, _ in steps]

    assert tokens(make_sampler()) == tokens(None)
    seeded = SamplingParams(temperature=1.0, top_p=0.95, top_k=50, seed=8)
    assert tokens(make_sampler(seeded)) == tokens(make_sampler(seeded))
    assert tokens(make_sampler(seeded)) != tokens(make_sampler(SamplingParams(temperature=1.0, seed=9)))
