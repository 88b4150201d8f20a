"""Every stochastic way to pick follows its distribution: chi-square over 100,000 draws each."""

import math

import attrs
import mlx.core as mx
import numpy as np
import pytest

from headrace_sampling import BatchSampler, HlgCurve, SamplingParams, ToneCurve, create_row_sampling, make_step_sampler

NUM_DRAWS = 100_000
LOGITS = np.array([2.0, 1.6, 1.0, 0.4, 0.0, -0.5, -1.0, -2.5])
# Below one in a hundred thousand of a fair generator's runs: chi-square quantiles for 1 to 7 degrees of freedom.
LIMITS = {1: 19.6, 2: 23.1, 3: 25.9, 4: 28.5, 5: 30.9, 6: 33.2, 7: 35.3}


def softmax(scores):
    weights = np.exp(np.asarray(scores) - np.max(scores))
    return weights / weights.sum()


def only(kept, temperature=1.0):
    return softmax(np.where(np.isin(np.arange(len(LOGITS)), kept), LOGITS / temperature, -np.inf))


def xtc(probability, dropped):
    kept = [token for token in range(len(LOGITS)) if token not in dropped]
    return probability * only(kept) + (1 - probability) * softmax(LOGITS)


def typical(share):
    p = softmax(LOGITS)
    distance = np.abs(np.log(p) + (p * -np.log(p)).sum())
    kept, mass = [], 0.0
    for token in np.argsort(distance):
        if kept and mass >= share:
            break
        kept.append(token)
        mass += p[token]
    return only(kept)


def hlg(curve, temperature):
    z = np.log(softmax(LOGITS))
    z = z - (z.max() - curve.pivot_offset)
    up, down = z - curve.width, -z - curve.width
    bent = np.where(up > 0, curve.width + curve.shoulder * np.log1p(np.maximum(up, 0) / curve.shoulder), z)
    bent = np.where(down > 0, -curve.width - curve.toe * np.log1p(np.maximum(down, 0) / curve.toe), bent)
    return softmax(bent / temperature)


PROBABILITIES = softmax(LOGITS)
SHORT = HlgCurve(pivot_offset=1.0, width=0.5, shoulder=0.7, toe=0.4)
CASES = {
    "temperature": ({"temperature": 0.6}, softmax(LOGITS / 0.6)),
    "hot": ({"temperature": 5.0}, softmax(LOGITS / 5)),
    "top_p": ({"top_p": 0.7}, only([0, 1, 2])),
    "top_k": ({"top_k": 4, "temperature": 2.0}, only([0, 1, 2, 3], 2.0)),
    "min_p": ({"min_p": math.exp(-1.7)}, only([0, 1, 2, 3])),
    "min_p keeps three": ({"min_p": 1.0, "min_tokens_to_keep": 3}, only([0, 1, 2])),
    "top_n_sigma": ({"top_n_sigma": 0.9}, only([0, 1, 2])),
    "typical_p": ({"typical_p": 0.5}, typical(0.5)),
    # The choices above 0.1 are tokens 0 to 2; the least likely of them stays.
    "xtc": ({"xtc_probability": 0.4, "xtc_threshold": 0.1}, xtc(0.4, [0, 1])),
    "xtc exempt": ({"xtc_probability": 1.0, "xtc_threshold": 0.1, "xtc_exempt": [0]}, xtc(1.0, [1])),
    "hlg": ({"hlg": SHORT, "temperature": 0.8}, hlg(SHORT, 0.8)),
    "hlg without ends": ({"hlg": HlgCurve(shoulder=0, toe=0), "temperature": 0.5}, softmax(LOGITS / 0.5)),
    "curve identity": ({"curve": ToneCurve(points=[(0.1, 0.1), (10, 10), (90, 90)])}, PROBABILITIES),
    "curve square": (
        {"curve": ToneCurve(points=[(1, 0.01), (10, 1), (100, 100)]), "temperature": 0.0},
        softmax(2 * LOGITS),
    ),
}


@pytest.mark.parametrize("vocab_size", [8, 3000])
@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_distribution(case, vocab_size):
    """The same with a vocabulary of impossible tokens around: candidates and blocks lose none."""
    fields, expected = CASES[case]
    params = SamplingParams(**{"temperature": 1.0, "seed": 17, **fields})
    num_rows = 1000 if vocab_size == 8 else 100
    places = np.random.default_rng(1).permutation(vocab_size)[:8]
    params = attrs.evolve(params, xtc_exempt=[int(places[token]) for token in params.xtc_exempt])
    logits = np.full(vocab_size, -np.inf, np.float32)
    logits[places] = LOGITS
    rows = [create_row_sampling(make_step_sampler(params, choice=choice)) for choice in range(num_rows)]
    batch, many = BatchSampler(), mx.broadcast_to(mx.array(logits), (num_rows, vocab_size))
    num_draws = NUM_DRAWS if vocab_size == 8 else 5000
    tokens = [batch.sample(many, rows).tokens for _ in range(num_draws // num_rows)]
    counts = np.bincount(np.array(mx.concatenate(tokens)), minlength=vocab_size)
    assert counts.sum() == counts[places].sum()
    observed, wanted = counts[places], expected * num_draws
    assert not observed[wanted == 0].any()
    possible = wanted > 0
    statistic = ((observed - wanted)[possible] ** 2 / wanted[possible]).sum()
    assert statistic < LIMITS[possible.sum() - 1]


def test_choices_and_neighbouring_seeds_are_unrelated():
    """Rows whose seeds are consecutive, or choices of one seed, agree no more often than chance."""
    vocab_size, num_rows = 2000, 400
    flat = mx.zeros((num_rows, vocab_size))
    for params in ({}, {"top_k": 1000}):
        seeded = [make_step_sampler(SamplingParams(temperature=1.0, seed=s, **params)) for s in range(num_rows)]
        choices = [
            make_step_sampler(SamplingParams(temperature=1.0, seed=3, **params), choice=c) for c in range(num_rows)
        ]
        for samplers in (seeded, choices):
            rows = [create_row_sampling(sampler) for sampler in samplers]
            tokens = np.array(BatchSampler().sample(flat, rows).tokens)
            # 400 draws from 1,000 or 2,000: 330 or more distinct at five standard deviations from 1,000.
            assert len(set(tokens.tolist())) > 290
            shifts = np.abs(np.diff(tokens))
            assert np.sum(shifts <= 2) < 12


def test_xtc_decides_per_row():
    """64 equal rows do not share the coin, as they do in mlx-lm."""
    params = SamplingParams(temperature=1e-6, xtc_probability=0.5, xtc_threshold=0.1, seed=1)
    rows = [create_row_sampling(make_step_sampler(params, choice=choice)) for choice in range(64)]
    tokens = BatchSampler().sample(mx.broadcast_to(mx.array([2.0, 1.5, 0.0]), (64, 3)), rows).tokens.tolist()
    assert 15 < tokens.count(1) < 49
    assert tokens.count(2) == 0


def test_choice_zero_is_the_seed_itself():
    """A request for one choice and the first of many draw alike."""
    params = SamplingParams(temperature=1.0, seed=5)
    assert make_step_sampler(params).seed == make_step_sampler(params, choice=0).seed == 5
    assert make_step_sampler(params, choice=1).seed != 5
