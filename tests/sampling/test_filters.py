"""Filters against slow and obvious ones."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_sampling import keep_min_p, keep_top_k, keep_top_p

# Distinct scores, so that no filter has to break a tie; spread so that probabilities differ clearly.
ROWS = st.lists(st.permutations([0.0, -0.3, -0.9, -1.4, -2.2, -3.1, -4.0, -6.0, -9.0]), min_size=1, max_size=4)


def kept(scores):
    return np.isfinite(np.array(scores.astype(mx.float32)))


def column(values):
    return mx.array([[value] for value in values], mx.float32)


def nucleus(row, top_p):
    """Indices of the smallest set of best tokens with at least the share, token by token."""
    weights = np.exp(np.array(row, np.float64))
    taken, mass = set(), 0.0
    for index in np.argsort(-weights):
        if taken and mass >= top_p * weights.sum():
            break
        taken.add(int(index))
        mass += weights[index]
    return taken


@settings(max_examples=60, deadline=None)
@given(ROWS, st.data())
def test_top_p_keeps_the_nucleus(rows, data):
    """The smallest set of best tokens that holds the share, one share per row."""
    shares = [data.draw(st.sampled_from([1e-9, 0.11, 0.37, 0.52, 0.83, 0.97, 0.9999])) for _ in rows]
    mask = kept(keep_top_p(mx.array(rows), column(shares)))
    for row, share, keeps in zip(rows, shares, mask, strict=True):
        assert set(np.flatnonzero(keeps)) == nucleus(row, share)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.data())
def test_min_p_keeps_what_is_likely_enough(rows, data):
    """A token stays if its probability is at least min_p times the best one's."""
    shares = [data.draw(st.sampled_from([1e-6, 0.04, 0.2, 0.5, 0.99, 1.0])) for _ in rows]
    mask = kept(keep_min_p(mx.array(rows), column([math.log(share) for share in shares])))
    for row, share, keeps in zip(rows, shares, mask, strict=True):
        probabilities = np.exp(np.array(row))
        assert set(np.flatnonzero(keeps)) == set(np.flatnonzero(probabilities >= share * probabilities.max()))


@settings(max_examples=40, deadline=None)
@given(ROWS, st.integers(1, 12))
def test_top_k_keeps_the_best_k(rows, top_k):
    """Exactly k tokens, the best ones; k of V or more keeps all."""
    mask = kept(keep_top_k(mx.array(rows), top_k))
    for row, keeps in zip(rows, mask, strict=True):
        assert set(np.flatnonzero(keeps)) == set(np.argsort(-np.array(row))[:top_k])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("value", [0.0, -5.0, 3e4, -math.inf])
def test_ties_keep_at_least_one_token_and_never_lose_the_dtype(dtype, value):
    """All scores equal: top-p and min-p keep every tie, top-k exactly k."""
    scores = mx.full((2, 7), value, dtype)
    for result in (keep_top_p(scores, column([0.5, 0.1])), keep_min_p(scores, column([-1.0, 0.0]))):
        assert result.dtype == dtype
        assert mx.array_equal(result, scores)
    assert keep_top_k(scores, 3).dtype == dtype
    assert math.isinf(value) or kept(keep_top_k(scores, 3)).sum(axis=1).tolist() == [3, 3]


def test_top_p_is_exact_over_a_large_vocabulary():
    """150,000 equal tokens and a best one: float32 sums from the unlikely end do not drift."""
    scores = np.full((1, 150_000), -math.log(300_000), np.float32)
    scores[0, 77] = math.log(0.5)
    assert kept(keep_top_p(mx.array(scores), column([0.49])))[0].sum() == 1
    assert kept(keep_top_p(mx.array(scores), column([0.51])))[0].sum() == 150_000


def test_a_filter_treats_each_row_alone():
    """Dropping the neighbours changes no bit."""
    random = np.random.default_rng(0)
    scores = mx.array(random.normal(size=(5, 2000)).astype(np.float32) * 4)
    shares = column([0.2, 0.5, 0.9, 0.99, 0.7])
    for keep, values in ((keep_top_p, shares), (keep_min_p, mx.log(shares))):
        together = keep(scores, values)
        for row in range(5):
            assert mx.array_equal(keep(scores[row : row + 1], values[row : row + 1])[0], together[row])
