"""Laws of mlx-lm's view of slots: a row of a batch cache is the single-row cache fed the same."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvcache import (
    BatchCache,
    CacheList,
    InvalidCountError,
    InvalidGeometry,
    InvalidLength,
    KVCache,
    NotTrimmable,
    QuantizedKVCache,
    RecurrentCache,
    RotatingKVCache,
    RotatingQuantizedKVCache,
    RoundRefusedError,
    UnsupportedCache,
    merge_caches,
)
from headrace_kvcache.single_rows import read_single

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32

KINDS = {
    "plain": KVCache,
    "ring": lambda: RotatingKVCache(6),
    "ring with sinks": lambda: RotatingKVCache(7, 2),
    "quantized": lambda: QuantizedKVCache(bits=8, group_size=32),
    "quantized ring": lambda: RotatingQuantizedKVCache(6, bits=4, group_size=32),
}

OPERATIONS = st.one_of(
    st.tuples(st.just("join"), st.integers(1, 3), st.integers(0, 9)),
    st.tuples(st.just("filter"), st.sets(st.integers(0, 5), min_size=1), st.booleans()),
    st.tuples(st.just("step"), st.sampled_from([1, 1, 1, 2, 30])),
    st.tuples(st.just("prompt"), st.lists(st.integers(1, 40), min_size=6, max_size=6), st.sampled_from([8, 20, 64])),
    st.tuples(st.just("round"), st.integers(0, 3), st.lists(st.floats(0, 1), min_size=6, max_size=6)),
    st.tuples(st.just("split"), st.sets(st.integers(0, 5), min_size=1)),
)


class Schedule:
    """Drives a batch cache and, beside it, one single-row cache per row."""

    def __init__(self, make_cache, seed):
        self.make_cache = make_cache
        self.random = np.random.default_rng(seed)
        self.alone = [make_cache()]
        self.batch = merge_caches([make_cache()])
        self.worst = 0.0

    def arrays(self, num_rows, num_tokens):
        return [
            mx.array(self.random.normal(size=(num_rows, heads, num_tokens, HEAD_DIM)).astype(np.float32))
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]

    def join(self, num_rows, num_tokens):
        """Rows that were filled alone, of different lengths, are merged and extend the batch."""
        if len(self.alone) + num_rows > 6:
            return
        rows = [self.make_cache() for _ in range(num_rows)]
        for index, cache in enumerate(rows):
            if num_tokens > index:
                cache.update_and_fetch(*self.arrays(1, num_tokens - index)[1:])
        self.alone += rows
        self.batch.extend(merge_caches(rows))

    def filter(self, which, is_array):
        keep = [index for index in sorted(which) if index < len(self.alone)]
        if keep:
            self.batch.filter(mx.array(keep) if is_array else keep)
            self.alone = [self.alone[index] for index in keep]

    def split(self, which):
        """A deep copy keeps some rows, the batch the others, and both join again in another order."""
        there = [index for index in sorted(which) if index < len(self.alone)]
        here = [index for index in range(len(self.alone)) if index not in there]
        if there and here:
            other = copy.deepcopy(self.batch)
            self.batch.filter(here)
            other.filter(there)
            other.extend(self.batch)
            self.batch, self.alone = other, [self.alone[index] for index in (*there, *here)]

    def step(self, num_tokens):
        self.feed(num_tokens, [num_tokens] * len(self.alone))

    def feed(self, num_tokens, counts):
        assert self.batch.offset.tolist() == [cache.offset for cache in self.alone]
        queries, keys, values = self.arrays(len(self.alone), num_tokens)
        mask = self.batch.make_mask(num_tokens)
        output = attention(queries, *self.batch.update_and_fetch(keys, values), mask)
        for row, (cache, count) in enumerate(zip(self.alone, counts, strict=True)):
            if count:
                own = [array[row : row + 1, :, :count] for array in (queries, keys, values)]
                mask = cache.make_mask(count)
                lone = attention(own[0], *cache.update_and_fetch(*own[1:]), mask)
                self.worst = max(self.worst, mx.abs(lone - output[row : row + 1, :, :count]).max().item())

    def prompt(self, lengths, chunk):
        """Right-padded prompts in chunks, as mlx-lm prefills them."""
        lengths = lengths[: len(self.alone)]
        longest = max(lengths)
        self.batch.prepare(lengths=lengths, right_padding=[longest - length for length in lengths])
        for start in range(0, longest, chunk):
            count = min(chunk, longest - start)
            self.feed(count, [max(0, min(count, length - start)) for length in lengths])
        self.batch.finalize()

    def round(self, drafts, shares):
        keeps = [int((drafts + 1) * share) for share in shares[: len(self.alone)]]
        assert self.batch.spec_round_fits(drafts)
        self.batch.spec_round_begin()
        self.feed(drafts + 1, keeps)
        self.batch.spec_round_rollback(keeps)

    def check(self):
        self.batch.check_integrity()
        assert self.batch.size() == max(cache.offset for cache in self.alone)
        for row, own in enumerate(self.alone):
            mine = self.batch.extract(row)
            assert type(mine) is type(own)
            assert mine.offset == own.offset
            pairs = zip(read_single(mine).fields, read_single(own).fields, strict=True)
            assert all(mx.array_equal(one, two) for one, two in pairs)


def attention(queries, keys, values, mask):
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.2, mask=mask)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=9), seed=st.integers(0, 2**16))
def test_a_row_of_a_batch_cache_equals_its_cache_alone(kind, operations, seed):
    """Attention within 2e-5 (float32), stored bytes equal, over joins, filters, splits, padded prompts, rounds."""
    schedule = Schedule(KINDS[kind], seed)
    for name, *arguments in operations:
        getattr(schedule, name)(*arguments)
        schedule.check()
    assert schedule.worst <= 2e-5


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_arrays_are_given_where_a_model_asks_for_them(num_tokens):
    """`return_array` turns "causal" into the boolean array that says the same; windows always give arrays."""
    batch = merge_caches([KVCache(), KVCache()])
    batch.update_and_fetch(*[mx.ones((2, 1, 4, 8))] * 2)
    expected = np.tri(num_tokens, 4 + num_tokens, 4, dtype=bool)
    mask = batch.make_mask(num_tokens, return_array=True)
    assert (mask is None and num_tokens == 1) or np.array_equal(np.array(mask), expected)
    window = np.array(batch.make_mask(num_tokens, window_size=2)).reshape(-1, num_tokens, 4 + num_tokens)[0]
    assert np.array_equal(window, expected & ~np.tri(num_tokens, 4 + num_tokens, 2, dtype=bool))


def filled(kind="plain", count=9):
    schedule = Schedule(KINDS[kind], 1)
    schedule.join(2, 5)
    schedule.step(count)
    return schedule


REFUSED = {
    "left padding of rows that hold something": (lambda b: b.prepare(left_padding=[1, 0, 0]), InvalidLength),
    "a length too few": (lambda b: b.prepare(lengths=[1], right_padding=[1, 0, 0]), InvalidLength),
    "rows of another form": (lambda b: b.extend(merge_caches([RotatingKVCache(99)])), InvalidGeometry),
    "other heads": (lambda b: b.update_and_fetch(*[mx.ones((3, 1, 1, HEAD_DIM))] * 2), InvalidGeometry),
    "other rows": (lambda b: b.update_and_fetch(*[mx.ones((2, KV_HEADS, 1, HEAD_DIM))] * 2), InvalidGeometry),
    "another dtype": (
        lambda b: b.update_and_fetch(*[mx.ones((3, KV_HEADS, 1, HEAD_DIM), mx.float16)] * 2),
        InvalidGeometry,
    ),
    "a negative trim": (lambda b: b.trim(-1), InvalidLength),
    "a round that is not open": (lambda b: b.spec_round_commit(), RoundRefusedError),
    "a negative draft": (lambda b: b.spec_round_fits(-1), InvalidCountError),
    "an unfinished prompt": (
        lambda b: (b.prepare(lengths=[1, 2, 2], right_padding=[1, 0, 0]), b.extend(merge_caches([KVCache()]))),
        InvalidLength,
    ),
    "nothing to merge": (lambda _: merge_caches([]), InvalidGeometry),
    "two kinds to merge": (lambda _: merge_caches([KVCache(), RotatingKVCache(6)]), InvalidGeometry),
    "an unknown kind to merge": (lambda _: merge_caches([object()]), UnsupportedCache),
    "recurrent and plain": (lambda _: merge_caches([RecurrentCache(), KVCache()]), UnsupportedCache),
    "lists of two lengths": (
        lambda _: merge_caches([CacheList(KVCache()), CacheList(KVCache(), KVCache())]),
        InvalidGeometry,
    ),
}


@pytest.mark.parametrize(("refused", "error"), REFUSED.values(), ids=REFUSED)
def test_a_refused_operation_changes_nothing(refused, error):
    """Typed errors; rows and bytes stay."""
    schedule = filled()
    with pytest.raises(error):
        refused(schedule.batch)
    schedule.batch.finalize()
    schedule.check()


def test_trim_after_append_equals_before():
    """Plain rows lose any number of positions, rings that have gone round only what their slack holds."""
    schedule = filled()
    before = [schedule.batch.extract(row) for row in range(3)]
    schedule.batch.update_and_fetch(*schedule.arrays(3, 4)[1:])
    assert schedule.batch.is_trimmable()
    assert schedule.batch.trim(4) == 4
    schedule.check()
    assert [cache.offset for cache in before] == schedule.batch.offset.tolist()
    ring = filled("ring", count=30)
    assert not ring.batch.is_trimmable()
    with pytest.raises(NotTrimmable):
        ring.batch.trim(20)
    ring.check()


def test_leaving_gives_memory_back():
    """Once half of the seats are free, the buffers shrink; without rows there are none."""
    schedule = Schedule(KVCache, 0)
    schedule.join(3, 9)
    full = schedule.batch.nbytes
    schedule.filter({0, 1, 3}, is_array=False)
    assert schedule.batch.nbytes == full
    schedule.filter({1, 2}, is_array=True)
    assert schedule.batch.nbytes == full // 2
    schedule.check()
    schedule.batch.filter([])
    assert schedule.batch.nbytes == 0
    assert isinstance(schedule.batch, BatchCache)


def test_recurrent_rows_and_lists_follow_their_rows():
    """Merge, extend, filter and extract keep each row's arrays; `lengths` count down over chunks."""
    singles = []
    for value in (1.0, 2.0, 3.0):
        cache = RecurrentCache(2)
        cache[0], cache[1] = mx.full((1, 3, 2), value), mx.full((1, 4), value)
        cache.advance(5)
        singles.append(CacheList(cache, KVCache()))
    batch = merge_caches(singles[:2])
    batch.extend(merge_caches([singles[2], CacheList(RecurrentCache(2), KVCache())]))
    recurrent = batch[0]
    assert recurrent[0][:, 0, 0].tolist() == [1, 2, 3, 0]
    batch.prepare(lengths=[3, 5, 1, 2], right_padding=[2, 0, 4, 3])
    assert recurrent.make_mask(4).sum(axis=1).tolist() == [3, 4, 1, 2]
    recurrent.advance(4)
    assert recurrent.make_mask(1).sum(axis=1).tolist() == [0, 1, 0, 0]
    recurrent.advance(1)
    batch.finalize()
    assert recurrent.make_mask(3) is None
    other = copy.deepcopy(recurrent)
    batch.filter([3, 1])
    assert [batch.extract(row)[0].offset for row in (0, 1)] == [2, 10]
    assert batch.extract(1)[0][1].tolist() == [[2.0] * 4]
    assert other.extract(2).offset == 6
    assert other[1].shape == (4, 4)
    with pytest.raises(InvalidGeometry):
        recurrent.prepare(left_padding=[1, 0])
