"""`attend` against a slow and obvious reference."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from headrace_kvcache import EmptyCache, InvalidGeometry, KVCache, RowBatch, attend


def reference(q, k, v, *, scale, window=None, sinks=None, softcap=None):
    """One row in float64: the last query stands at the last column."""
    num_heads, num_queries, _ = q.shape
    num_kv_heads, num_columns, _ = k.shape
    out = np.zeros((num_heads, num_queries, v.shape[-1]))
    for head, query in itertools.product(range(num_heads), range(num_queries)):
        position = num_columns - num_queries + query
        first = 0 if window is None else max(0, position - window + 1)
        kv_head = head // (num_heads // num_kv_heads)
        scores = k[kv_head, first : position + 1] @ q[head, query] * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - scores.max()))
        out[head, query] = (weights / total) @ v[kv_head, first : position + 1]
    return out


def draw(random, *shape):
    return random.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attend_equals_the_reference(kv_heads, window, with_sinks, softcap):
    """Both caches, grouped heads, window, sinks and softcap: float32 within 1e-5 of float64."""
    random = np.random.default_rng(7)
    sinks = draw(random, 4) if with_sinks else None
    options = {"scale": 0.4, "window": window, "softcap": softcap}
    lone, batch = KVCache(), RowBatch(1, max_rows=3)
    for _ in range(3):
        batch.join()
    batch.leave(1)
    held_keys, held_values = np.zeros((kv_heads, 0, 8)), np.zeros((kv_heads, 0, 6))
    for num_tokens in (3, 1, 1, 5, 2):
        q, k, v = draw(random, 1, 4, num_tokens, 8), draw(random, 1, kv_heads, num_tokens, 8), None
        v = draw(random, 1, kv_heads, num_tokens, 6)
        held_keys, held_values = np.append(held_keys, k[0], axis=1), np.append(held_values, v[0], axis=1)
        expected = reference(q[0], held_keys, held_values, sinks=sinks, **options)
        arrays = [mx.array(array) for array in (q, k, v)]
        mx_sinks = None if sinks is None else mx.array(sinks)
        got = attend(lone, *arrays, sinks=mx_sinks, **options)
        assert np.abs(np.array(got[0]) - expected).max() <= 1e-5
        [view] = batch.view([0, 2], num_tokens)
        got = attend(view, *(mx.concatenate([array, array]) for array in arrays), sinks=mx_sinks, **options)
        batch.advance([0, 2], num_tokens)
        assert np.abs(np.array(got) - expected).max() <= 1e-5


def test_attending_a_lone_cache_without_appending():
    """keys=values=None: the queries are the last positions held, and nothing is appended."""
    random = np.random.default_rng(3)
    cache = KVCache()
    q, k, v = (mx.array(draw(random, 1, 2, 4, 8)) for _ in range(3))
    appended = attend(cache, q, k, v, scale=1.0, window=2)
    assert mx.array_equal(attend(cache, q, None, None, scale=1.0, window=2), appended)
    assert cache.offset == 4


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((1, 3, 1, 8), (1, 2, 1, 8), (1, 2, 1, 8)),
        ((1, 2, 1, 8), (1, 2, 2, 8), (1, 2, 2, 8)),
        ((1, 2, 1, 8), (1, 2, 1, 4), (1, 2, 1, 8)),
        ((1, 2, 1, 8), (1, 2, 1, 8), (1, 1, 1, 8)),
        ((1, 2, 1, 8), (1, 2, 1, 8), None),
    ],
)
@pytest.mark.parametrize("kind", ["lone", "slots"])
def test_arrays_that_do_not_fit_are_refused(q, k, v, kind):
    """The error names the shapes; the cache is untouched."""
    batch = RowBatch(1, max_rows=1)
    batch.join()
    cache = KVCache() if kind == "lone" else batch.view([0], 1)[0]
    with pytest.raises(InvalidGeometry):
        attend(cache, mx.ones(q), mx.ones(k), None if v is None else mx.ones(v), scale=1.0)
    assert batch.nbytes == 0
    assert kind == "slots" or cache.empty()


def test_an_empty_cache_cannot_be_attended():
    """There is nothing to see: a typed error, no NaN."""
    with pytest.raises(EmptyCache):
        attend(KVCache(), mx.ones((1, 1, 1, 8)), None, None, scale=1.0)
    cache = KVCache()
    attend(cache, *[mx.ones((1, 1, 1, 8))] * 3, scale=1.0)
    with pytest.raises(EmptyCache):
        attend(cache, mx.ones((1, 1, 2, 8)), None, None, scale=1.0)


@pytest.mark.parametrize(
    "option", [{"window": 0}, {"window": 2.0}, {"window": True}, {"softcap": 0.0}, {"softcap": -1.0}]
)
def test_options_that_would_mask_everything_are_refused(option):
    """A window or cap outside its range is an error before the append, and no NaN."""
    cache = KVCache()
    with pytest.raises(ValueError, match=next(iter(option))):
        attend(cache, *[mx.ones((1, 1, 1, 8))] * 3, scale=1.0, **option)
    assert cache.empty()
