"""Laws of every single-row cache: what it holds, what it costs, what it refuses, and what attention over it gives."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvcache import (
    CacheList,
    ChunkedKVCache,
    EmptyCache,
    InvalidGeometry,
    InvalidLength,
    KVCache,
    NotTrimmable,
    QuantizedKVCache,
    RecurrentCache,
    RotatingKVCache,
    RotatingQuantizedKVCache,
    TurboQuantKVCache,
    UnsupportedCache,
    attend,
)

HEADS, KV_HEADS, SIZE = 4, 2, 64
DTYPES = [mx.float32, mx.bfloat16, mx.float16]
TOLERANCE = {mx.float32: 2e-5, mx.bfloat16: 6e-2, mx.float16: 1e-2}

KINDS = {
    "plain": KVCache,
    "quantized": lambda: QuantizedKVCache(bits=4, group_size=32),
    "turbo": lambda: TurboQuantKVCache(key_bits=4, value_bits=3),
    "ring": lambda: RotatingKVCache(24),
    "ring with sinks": lambda: RotatingKVCache(24, 5),
    "quantized ring": lambda: RotatingQuantizedKVCache(24, bits=8, group_size=32),
    "quantized ring with sinks": lambda: RotatingQuantizedKVCache(24, 4, bits=3, group_size=32),
    "large ring": lambda: RotatingKVCache(300, 2),
    "chunked": lambda: ChunkedKVCache(20),
    "large chunked": lambda: ChunkedKVCache(300),
}


def arrays(seed, num_tokens, dtype=mx.float32):
    """Queries, keys and values of a whole sequence."""
    shapes = [(1, HEADS, num_tokens, SIZE), *[(1, KV_HEADS, num_tokens, SIZE)] * 2]
    keys = mx.random.split(mx.random.key(seed), 3)
    return [mx.random.normal(shape, key=key).astype(dtype) for shape, key in zip(shapes, keys, strict=True)]


def visible(cache, position, window):
    """The positions that a position sees, told by the cache's documentation and not by its code."""
    seen = range(position + 1)
    if isinstance(cache, ChunkedKVCache):
        seen = [each for each in seen if each // cache.chunk_size == position // cache.chunk_size]
    size, keep = getattr(cache, "max_size", None), getattr(cache, "keep", 0)
    if size is not None:
        seen = [each for each in seen if each < keep or each > position - (size - keep)]
    if window is not None:
        seen = [each for each in seen if each < keep or each > position - window]
    return list(seen)


def reference(cache, queries, keys, values, *, window=None, sinks=None, softcap=None):
    """Attention in float64 over keys and values that passed the cache's own form."""
    keys, values = cache.form.decode(cache.form.encode(keys, values))
    queries, keys, values = (np.array(one.astype(mx.float32), np.float64)[0] for one in (queries, keys, values))
    out = np.zeros(queries.shape)
    for head, position in np.ndindex(queries.shape[:2]):
        seen = visible(cache, position, window)
        scores = keys[head // 2, seen] @ queries[head, position] * 0.2
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        extra = -np.inf if sinks is None else sinks[head].item()
        highest = max(scores.max(), extra)
        weights = np.exp(scores - highest)
        out[head, position] = weights @ values[head // 2, seen] / (weights.sum() + np.exp(extra - highest))
    return out


def part(sequence, start, stop):
    return [one[:, :, start:stop] for one in sequence]


CHUNKS = st.lists(st.sampled_from([1, 1, 1, 2, 7, 24, 25, 40]), min_size=1, max_size=8)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(
    chunks=CHUNKS,
    window=st.sampled_from([None, 1, 6, 24, 100]),
    has_sinks=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    dtype=st.sampled_from(DTYPES),
)
def test_attention_is_that_of_float64_whatever_the_chunks(kind, chunks, window, has_sinks, softcap, dtype):
    """Windows, sinks, soft caps and wraps: every position attends as it would alone in float64."""
    cache = KINDS[kind]()
    sequence = arrays(sum(chunks), sum(chunks), dtype)
    sinks = mx.random.normal((HEADS,), key=mx.random.key(5)).astype(dtype) if has_sinks else None
    options = {"window": window, "sinks": sinks, "softcap": softcap}
    outputs, start = [], 0
    for count in chunks:
        queries, keys, values = part(sequence, start, start + count)
        outputs.append(attend(cache, queries, keys, values, scale=0.2, **options))
        again = attend(cache, queries, None, None, scale=0.2, **options)
        assert mx.array_equal(outputs[-1], again), "attending without appending sees the same"
        start += count
        assert cache.offset == start
        cache.check_integrity()
    got = mx.concatenate(outputs, axis=2)
    assert got.dtype == dtype
    wanted = reference(cache, *sequence, **options)
    np.testing.assert_allclose(np.array(got.astype(mx.float32))[0], wanted, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(chunks=CHUNKS, window=st.sampled_from([None, 6, 24]), return_array=st.booleans())
def test_masks_fit_what_the_append_returns(kind, chunks, window, return_array):
    """`make_mask` before and `update_and_fetch` after: mlx-lm's two halves of `attend`."""
    fetching, attending = KINDS[kind](), KINDS[kind]()
    sequence, start = arrays(3, sum(chunks)), 0
    for count in chunks:
        queries, keys, values = part(sequence, start, start + count)
        if isinstance(fetching, ChunkedKVCache):
            fetching.maybe_trim_front()
        mask = fetching.make_mask(count, window_size=window, return_array=return_array)
        assert not (return_array and isinstance(mask, str))
        held = fetching.update_and_fetch(keys, values)
        got = mx.fast.scaled_dot_product_attention(queries, *held, scale=0.2, mask=mask)
        wanted = attend(attending, queries, keys, values, scale=0.2, window=window)
        assert mx.abs(got - wanted).max().item() < 2e-5
        start += count


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(first=st.integers(1, 20), added=st.integers(1, 20), is_split=st.booleans())
def test_trim_after_append_equals_before(kind, first, added, is_split):
    """What was trimmed leaves no trace: the next attention is that of a cache that never held it, bit for bit."""
    cache, untouched = KINDS[kind](), KINDS[kind]()
    sequence, other = arrays(1, first + added), arrays(2, 3)
    for each in (cache, untouched):
        each.update_and_fetch(*part(sequence, 0, first)[1:])
    for _ in range(added if is_split else 1):
        start = cache.offset
        cache.update_and_fetch(*part(sequence, start, start + (1 if is_split else added))[1:])
    if cache.is_trimmable():
        assert cache.trim(added) == added
        assert (cache.offset, cache.size()) == (untouched.offset, untouched.size())
        for count in (1, 2):
            got, wanted = (attend(each, *part(other, 0, count), scale=0.2) for each in (cache, untouched))
            assert mx.abs(got - wanted).max().item() < 1e-6
        cache.check_integrity()
        if cache.is_trimmable():
            assert cache.trim(1000) == first + 3
            cache.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(
    chunks=st.lists(st.sampled_from([1, 5, 24, 200, 256, 257]), min_size=1, max_size=5), dtype=st.sampled_from(DTYPES)
)
def test_capacity_depends_on_the_offset_alone(kind, chunks, dtype):
    """Whatever the appends were, a cache at rest has the slabs of its offset (ruling K-30a)."""
    cache = KINDS[kind]()
    for count in chunks:
        _, keys, values = arrays(1, count, dtype)
        cache.update_and_fetch(keys, values)
    offset = sum(chunks)
    capacity = -(-offset // 256) * 256
    if isinstance(cache, (RotatingKVCache, RotatingQuantizedKVCache)):
        cache.compact()
        capacity = min(capacity, cache.max_size)
    if isinstance(cache, ChunkedKVCache):
        cache.maybe_trim_front()
        assert cache.start_position == max(0, offset - cache.chunk_size)
        capacity -= cache.start_position // 256 * 256
    cache.check_integrity()
    one = sum(field.nbytes for field in cache.form.encode(*arrays(1, 1, dtype)[1:]))
    assert cache.nbytes == capacity * one


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6, deadline=None)
@given(chunks=st.lists(st.sampled_from([1, 3, 24, 40]), min_size=1, max_size=4))
def test_a_cache_made_from_a_state_goes_its_own_way(kind, chunks):
    """State, `from_state` and deep copies go on as the original would, and neither sees the other's writes."""
    cache = KINDS[kind]()
    for count in chunks:
        cache.update_and_fetch(*arrays(count, count)[1:])
    state = cache.state
    twins = [type(cache).from_state(state), copy.deepcopy(cache), type(cache).from_state(cache.state)]
    assert [twin.nbytes for twin in twins[1:2]] == [cache.nbytes]
    attend(twins[2], *arrays(99, 2), scale=0.2)
    for count in (1, 2, 1):
        step = arrays(7, count)
        wanted = attend(cache, *step, scale=0.2)
        for twin in twins[:2]:
            twin.check_integrity()
            assert (twin.offset, twin.size()) == (cache.offset, cache.size()) or twin.offset == cache.offset - count
            assert mx.array_equal(attend(twin, *step, scale=0.2), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_fetched_arrays_and_states_do_not_change_later(kind):
    """A holder of what was fetched never sees later appends, not even where the buffers are full."""
    cache = KINDS[kind]()
    for count in (24, 1, 1, 300, 1, 1):
        _, keys, values = arrays(count, count)
        held = cache.update_and_fetch(keys, values)
        copies = [mx.array(np.array(one)) for one in held]
        cache.update_and_fetch(*arrays(4, 1)[1:])
        assert all(mx.array_equal(one, other) for one, other in zip(held, copies, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_refused_operations_change_nothing(kind):
    """Other rows, heads, sizes, dtypes or counts: the error comes before any change."""
    cache = KINDS[kind]()
    cache.update_and_fetch(*arrays(1, 30)[1:])
    before, offset = [np.array(one) for one in cache.keys_and_values()], cache.offset
    good = mx.ones((1, KV_HEADS, 1, SIZE))
    bad = [
        (mx.ones((2, KV_HEADS, 1, SIZE)), mx.ones((2, KV_HEADS, 1, SIZE))),
        (mx.ones((1, 1, 1, SIZE)), mx.ones((1, 1, 1, SIZE))),
        (good, mx.ones((1, KV_HEADS, 2, SIZE))),
        (good, mx.ones((1, KV_HEADS, 1, 2 * SIZE))),
        (good.astype(mx.bfloat16), good.astype(mx.bfloat16)),
        (good[:, :, :0], good[:, :, :0]),
    ]
    for keys, values in bad:
        with pytest.raises(InvalidGeometry):
            cache.update_and_fetch(keys, values)
    for count in (-1, 1.0, True):
        with pytest.raises(InvalidLength):
            cache.trim(count)
    if not cache.is_trimmable():
        with pytest.raises(NotTrimmable):
            cache.trim(1)
    assert cache.trim(0) == 0
    assert cache.offset == offset
    cache.check_integrity()
    for one, other in zip(cache.keys_and_values(), before, strict=True):
        np.testing.assert_array_equal(np.array(one), other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_cache_holds_nothing(kind):
    """Making caches to probe a model is free, and there is nothing to see."""
    cache = KINDS[kind]()
    assert (cache.empty(), cache.size(), cache.nbytes, cache.is_trimmable(), cache.offset) == (True, 0, 0, True, 0)
    assert cache.keys is cache.values is None
    assert type(cache).from_state(cache.state).empty()
    with pytest.raises(EmptyCache):
        cache.keys_and_values()
    with pytest.raises(EmptyCache):
        attend(cache, mx.ones((1, HEADS, 1, SIZE)), None, None, scale=1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_no_cache_promises_packed_bits(kind):
    """An attribute `bits` would make mlx-lm's models expect triples; `to_quantized` is there only where it works."""
    cache = KINDS[kind]()
    assert not hasattr(cache, "bits")
    assert hasattr(cache, "to_quantized") == (type(cache) in (KVCache, RotatingKVCache))


@pytest.mark.parametrize("make", [KVCache, lambda: RotatingKVCache(24, 3)], ids=["plain", "ring"])
@settings(max_examples=10, deadline=None)
@given(chunks=CHUNKS, bits=st.sampled_from([2, 3, 4, 5, 6, 8]))
def test_converting_is_quantizing_what_was_appended(make, chunks, bits):
    """Quantize-then-slice equals slice-then-quantize: a converted cache goes on as one that was always quantized."""
    plain = make()
    always = (
        QuantizedKVCache(bits=bits, group_size=32)
        if isinstance(plain, KVCache)
        else RotatingQuantizedKVCache(24, 3, bits=bits, group_size=32)
    )
    for count in chunks:
        step = arrays(count, count)[1:]
        plain.update_and_fetch(*step)
        always.update_and_fetch(*step)
    converted = plain.to_quantized(bits=bits, group_size=32)
    if isinstance(always, RotatingQuantizedKVCache):
        always.compact()
    assert converted.nbytes == always.nbytes
    for count in (1, 3):
        step = arrays(8, count)
        assert mx.abs(attend(converted, *step, scale=0.2) - attend(always, *step, scale=0.2)).max().item() < 1e-5


@pytest.mark.parametrize("make", [KVCache, lambda: RotatingKVCache(24)], ids=["plain", "ring"])
def test_converting_what_mlx_cannot_pack_is_refused(make):
    """The error names the head size; the cache stays as it is."""
    cache = make()
    cache.update_and_fetch(*[mx.ones((1, 1, 3, 48))] * 2)
    with pytest.raises(InvalidGeometry, match="48"):
        cache.to_quantized(bits=4, group_size=32)
    assert cache.offset == 3
    assert make().to_quantized(bits=4, group_size=32).empty()


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (RotatingKVCache, {"max_size": 0}),
        (RotatingKVCache, {"max_size": True}),
        (RotatingKVCache, {"max_size": 4, "keep": 4}),
        (RotatingKVCache, {"max_size": 4, "keep": -1}),
        (RotatingQuantizedKVCache, {"max_size": 8, "group_size": 48}),
        (QuantizedKVCache, {"bits": 7}),
        (ChunkedKVCache, {"chunk_size": 0}),
        (RecurrentCache, {"size": 0}),
    ],
)
def test_sizes_are_checked(make, sizes):
    """A size outside its range is refused when the cache is made."""
    with pytest.raises(InvalidGeometry):
        make(**sizes)


@pytest.mark.parametrize("make", [lambda: RotatingKVCache(24, 2), lambda: ChunkedKVCache(20)], ids=["ring", "chunked"])
def test_queries_that_would_see_too_little_are_refused(make):
    """Without appending, a query whose first columns are overwritten gets an error and not an answer."""
    cache = make()
    for count in (30, 15, 1):
        attend(cache, *arrays(1, count), scale=0.2)
    queries, _, _ = arrays(1, 8)
    attend(cache, queries[:, :, :1], None, None, scale=0.2)
    with pytest.raises(EmptyCache):
        attend(cache, queries, None, None, scale=0.2)


def test_chunked_trims_only_into_a_whole_chunk():
    """Trimming back into a chunk whose start is gone would attend to too little, so it is refused."""
    cache = ChunkedKVCache(10)
    for count in (10, 5):
        attend(cache, *arrays(1, count), scale=0.2)
    cache.maybe_trim_front()
    assert (cache.offset, cache.start_position, cache.is_trimmable()) == (15, 5, False)
    assert cache.trim(5) == 5
    with pytest.raises(NotTrimmable):
        cache.trim(1)
    assert cache.offset == 10


def test_recurrent_holds_arrays_and_lengths():
    """Arrays by index, a mask of the real inputs, a state of its own, and no trimming."""
    cache = RecurrentCache(2)
    assert (cache[0], cache.make_mask(3), cache.empty(), cache.nbytes) == (None, None, True, 0)
    cache[0], cache[1] = mx.ones((1, 3, 8), mx.bfloat16), mx.ones((1, 2, 4, 4))
    cache.lengths = mx.array([2])
    assert cache.make_mask(3).tolist() == [[True, True, False]]
    twin = RecurrentCache.from_state(cache.state)
    cache.advance(2)
    cache[1] = mx.zeros((1, 2, 4, 4))
    assert (cache.offset, cache.lengths.tolist(), cache.nbytes) == (2, [0], 3 * 8 * 2 + 32 * 4)
    assert (twin.offset, twin.lengths.tolist(), twin[1].sum().item()) == (0, [2], 32)
    assert (cache.is_trimmable(), cache.trim(0), cache.size(), cache.empty()) == (False, 0, 0, False)
    with pytest.raises(NotTrimmable):
        cache.trim(1)


def test_a_list_is_trimmed_as_a_whole():
    """All members or none, and a list made from its state holds the same."""
    kv, ring = KVCache(), RotatingKVCache(24)
    pair = CacheList(kv, ring)
    for cache in (kv, ring):
        cache.update_and_fetch(*arrays(1, 20)[1:])
    assert pair[1] is ring
    assert (pair.trim(3), kv.offset, ring.offset, pair.size(), pair.empty()) == (3, 17, 17, 17, False)
    assert pair.nbytes == kv.nbytes + ring.nbytes
    ring.update_and_fetch(*arrays(1, 20)[1:])
    with pytest.raises(NotTrimmable):
        pair.trim(1)
    assert kv.offset == 17
    twin = CacheList.from_state(pair.state)
    assert [type(one) for one in twin.caches] == [KVCache, RotatingKVCache]
    assert mx.array_equal(twin[1].keys_and_values()[0], ring.keys_and_values()[0])
    with pytest.raises(UnsupportedCache, match="Strange"):
        CacheList.from_state([(None, "Strange")])
