"""Laws of chunked slots: a row in a batch is the row alone on a `ChunkedKVCache`, and sees its own chunk only."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvcache import (
    CapacityClasses,
    ChunkedKVCache,
    ChunkedRowBatch,
    EmptyCache,
    InvalidGeometry,
    InvalidLength,
    KVCache,
    RotatingKVCache,
    RoundRefusedError,
    UnsupportedCache,
    attend,
    make_row_batch,
    merge_caches,
)
from headrace_kvcache.single_rows import read_single

MAX_ROWS = 4
HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 4, 2, 32, 64
SMALL = CapacityClasses(capacities=(3, 8))
# Per layout: chunk size of each layer, None for a plain layer; and the slack.
LAYOUTS = {"one size": ((7, 7), 3), "two sizes and plain": ((5, None, 12), 4), "no slack": ((4,), 0)}
UNITS = {mx.float32: 2e-5, mx.bfloat16: 2**-6}

OPERATIONS = st.one_of(
    st.tuples(st.just("join")),
    st.tuples(st.just("leave"), st.integers(0, 3)),
    st.tuples(st.just("swap"), st.integers(0, 3)),
    st.tuples(st.just("rollback"), st.integers(0, 3), st.integers(1, 12)),
    st.tuples(
        st.just("step"),
        st.sets(st.integers(0, 3), min_size=1),
        st.sampled_from([1, 1, 1, 2, 4, 9, 20]),
        st.lists(st.floats(0, 1), min_size=4, max_size=4) | st.none(),
    ),
    st.tuples(
        st.just("round"),
        st.sets(st.integers(0, 3), min_size=1),
        st.integers(0, 3),
        st.lists(st.floats(0, 1), min_size=4, max_size=4),
    ),
)


class Schedule:
    """Drives the slots and, beside them, each row's lone caches and its whole history."""

    def __init__(self, sizes, slack, seed, *, dtype=mx.float32, **attention):
        self.sizes = sizes
        self.batch = make_row_batch(self.make_caches(), max_rows=MAX_ROWS, classes=SMALL, slack=slack)
        self.dtype, self.attention = dtype, attention
        self.alone, self.histories = {}, {}
        self.random = np.random.default_rng(seed)
        self.worst = 0.0

    def make_caches(self):
        return [KVCache() if size is None else ChunkedKVCache(size) for size in self.sizes]

    def seat(self, slot, caches, histories):
        self.alone[slot], self.histories[slot] = caches, histories

    def join(self):
        if len(self.alone) < MAX_ROWS:
            self.seat(self.batch.join(), self.make_caches(), [[] for _ in self.sizes])

    def leave(self, slot):
        if slot in self.alone:
            self.batch.leave(slot)
            return self.alone.pop(slot), self.histories.pop(slot)
        return None

    def swap(self, slot):
        """A row leaves as single caches and goes on from these; those that were alone take its slot."""
        if slot in self.alone:
            extracted = self.batch.extract(slot)
            lone, histories = self.leave(slot)
            self.seat(self.batch.join_caches(lone), extracted, histories)

    def rollback(self, slot, count):
        """What is refused changes nothing; what is allowed equals never having appended."""
        if slot not in self.alone:
            return
        end = max(0, self.batch.end(slot) - count)
        if end < self.batch.least_end(slot):
            with pytest.raises(InvalidLength):
                self.batch.set_end(slot, end)
            return
        self.batch.set_end(slot, end)
        self.alone[slot] = self.make_caches()
        for cache, history in zip(self.alone[slot], self.histories[slot], strict=True):
            del history[end:]
            if end:
                keys, values = (mx.concatenate(side, axis=2) for side in zip(*history, strict=True))
                attend(cache, mx.zeros((1, HEADS, end, HEAD_DIM), self.dtype), keys, values, scale=0.2)

    def arrays(self, num_rows, num_tokens):
        shapes = [(HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM)]
        return [
            mx.array(self.random.normal(size=(num_rows, heads, num_tokens, size))).astype(self.dtype)
            for heads, size in shapes
        ]

    def forward(self, slots, num_tokens, counts, *, lengths=None):
        """Run the batch over T positions and each row alone over the first `counts`."""
        views = self.batch.view(slots, num_tokens, lengths=lengths)
        for layer, view in enumerate(views):
            assert view.offset.tolist() == [self.batch.end(slot) for slot in slots]
            queries, keys, values = self.arrays(len(slots), num_tokens)
            together = attend(view, queries, keys, values, scale=0.2, **self.attention)
            again = attend(view, queries, None, None, scale=0.2, **self.attention)
            assert mx.array_equal(together, again), "attending without appending must see the same"
            for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
                if count:
                    own = [array[row : row + 1, :, :count] for array in (queries, keys, values)]
                    lone = attend(self.alone[slot][layer], *own, scale=0.2, **self.attention)
                    self.compare(together[row : row + 1, :, :count], lone)
                    steps = [(own[1][:, :, t : t + 1], own[2][:, :, t : t + 1]) for t in range(count)]
                    self.histories[slot][layer] += steps
        self.batch.advance(slots, num_tokens if lengths is None else lengths)

    def compare(self, together, lone):
        expected = lone.astype(mx.float32)
        difference = mx.abs(together.astype(mx.float32) - expected) / mx.maximum(mx.abs(expected), 1)
        assert not mx.isnan(difference).any().item(), "max() would pass over NaN"
        self.worst = max(self.worst, difference.max().item())

    def step(self, which, num_tokens, shares):
        slots = sorted(which & set(self.alone))
        if slots:
            counts = [num_tokens if shares is None else 1 + int((num_tokens - 1) * shares[slot]) for slot in slots]
            self.forward(slots, num_tokens, counts, lengths=None if shares is None else counts)

    def round(self, which, drafts, shares):
        slots = sorted(which & set(self.alone))
        if not slots or not self.batch.spec_round_fits(drafts, slots=slots):
            return
        keeps = [int((drafts + 1) * shares[slot]) for slot in slots]
        self.batch.spec_round_begin(slots=slots)
        self.forward(slots, drafts + 1, keeps)
        self.batch.spec_round_rollback(keeps)

    def check(self):
        self.batch.check_integrity()
        assert self.batch.joined == tuple(sorted(self.alone))
        for slot, lone in self.alone.items():
            for mine, own in zip(self.batch.extract(slot), lone, strict=True):
                assert type(mine) is type(own)
                assert mine.offset == own.offset == self.batch.end(slot)
                for one, other in zip(read_single(mine).fields, read_single(own).fields, strict=True):
                    assert mx.array_equal(one, other), "cached bytes differ"


def run(operations, layout, seed, **options):
    schedule = Schedule(*LAYOUTS[layout], seed, **options)
    schedule.join()
    for name, *arguments in operations:
        getattr(schedule, name)(*arguments)
        schedule.check()
    return schedule


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", UNITS, ids=str)
@settings(max_examples=15, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=14), seed=st.integers(0, 2**16))
def test_a_row_in_a_batch_equals_the_row_alone(layout, dtype, operations, seed):
    """Outputs within 2e-5 (float32) or two units of the last place (bfloat16); stored bytes are equal."""
    assert run(operations, layout, seed, dtype=dtype).worst <= UNITS[dtype]


@settings(max_examples=15, deadline=None)
@given(
    operations=st.lists(OPERATIONS, max_size=8),
    seed=st.integers(0, 2**16),
    options=st.sampled_from([{"window": 3}, {"softcap": 2.0}, {"sinks": mx.arange(4.0)}, {"window": 9}]),
)
def test_windows_sinks_and_caps_narrow_a_chunk(operations, seed, options):
    """With `attend`'s own options a row in a batch still equals the row alone."""
    assert run(operations, "one size", seed, **options).worst <= UNITS[mx.float32]


@pytest.mark.parametrize("end", [1, 6, 7, 8, 13, 14, 15, 30])
def test_a_query_sees_its_own_chunk_up_to_itself(end):
    """Decode against float64 over the positions of the query's chunk."""
    schedule = Schedule((7,), 3, end)
    schedule.join(), schedule.join()
    schedule.step({0}, end, None)
    schedule.step({1}, 2 * end, None)
    queries, keys, values = schedule.arrays(2, 1)
    [view] = schedule.batch.view([0, 1], 1)
    output = np.array(attend(view, queries, keys, values, scale=0.2))
    for row, position in enumerate([end, 2 * end]):
        history = [*schedule.histories[row][0], (keys[row : row + 1], values[row : row + 1])]
        seen = history[position // 7 * 7 :]
        own_keys, own_values = (
            np.concatenate([np.array(each, np.float64)[0] for each in side], axis=1) for side in zip(*seen, strict=True)
        )
        grouped = np.array(queries[row], np.float64).reshape(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        weights = np.exp(np.einsum("hgd,hld->hgl", grouped, own_keys) * 0.2)
        weights /= weights.sum(-1, keepdims=True)
        expected = np.einsum("hgl,hld->hgd", weights, own_values).reshape(HEADS, VALUE_DIM)
        assert np.abs(expected - output[row, :, 0]).max() <= 2e-5


@pytest.mark.parametrize("end", range(1, 40))
def test_a_row_goes_back_as_far_as_a_chunk_is_held_from_its_start(end):
    """The slack can always be taken back; the lowest end is the first whose last position's chunk is held."""
    chunk_size, slack = 7, 3
    schedule = Schedule((chunk_size,), slack, end)
    schedule.join()
    schedule.step({0}, end, None)
    first_held = max(0, end - chunk_size - slack)
    whole = [low for low in range(1, end + 1) if (low - 1) // chunk_size * chunk_size >= first_held]
    least = min(whole) if first_held else 0
    assert schedule.batch.least_end(0) == least <= max(0, end - slack)
    schedule.rollback(0, end - least)
    schedule.check()
    schedule.step({0}, 2, None)
    schedule.check()
    assert schedule.worst <= 2e-5


@pytest.mark.parametrize("end", [6, 7, 8, 14, 20])
def test_a_joined_row_goes_back_within_its_last_chunk(end):
    """A row that came from single caches brought its last chunk, and can be rolled back to its first position."""
    schedule = Schedule((7,), 3, end)
    schedule.join()
    schedule.step({0}, end, None)
    schedule.swap(0)
    start = (end - 1) // 7 * 7
    assert schedule.batch.least_end(0) == (start + 1 if start else 0)
    schedule.rollback(0, end - start - 1)
    schedule.check()
    schedule.step({0}, 9, None)
    schedule.check()
    assert schedule.worst <= 2e-5


@pytest.mark.parametrize("make_cache", [lambda: ChunkedKVCache(6), lambda: RotatingKVCache(6)], ids=["chunk", "ring"])
def test_queries_without_keys_see_all_or_are_refused(make_cache):
    """A joined row brought what its last position sees: that one can be asked again, those before it cannot."""
    batch, cache = make_row_batch([make_cache()], max_rows=1, slack=4), make_cache()
    arrays = [mx.random.normal((1, 2, 13, 32)) for _ in range(3)]
    output = attend(cache, *arrays, scale=0.2)
    slot = batch.join_caches([cache])
    [view] = batch.view([slot], 1)
    again = attend(view, arrays[0][:, :, -1:], None, None, scale=0.2)
    assert mx.abs(again - output[:, :, -1:]).max().item() <= 2e-5
    [view] = batch.view([slot], 2)
    with pytest.raises(EmptyCache):
        attend(view, arrays[0][:, :, -2:], None, None, scale=0.2)


def test_a_rollback_past_what_is_held_is_refused():
    """As rings do: a typed error, nothing changes, and the round can still be kept."""
    schedule = Schedule((7,), 3, 1)
    schedule.join()
    schedule.step({0}, 20, None)
    assert schedule.batch.spec_round_fits(2)
    assert not schedule.batch.spec_round_fits(3)
    schedule.batch.spec_round_begin()
    schedule.step({0}, 6, None)
    with pytest.raises(RoundRefusedError, match="overwritten"):
        schedule.batch.spec_round_rollback(0)
    schedule.batch.spec_round_commit()
    schedule.check()


def test_a_slot_costs_its_chunk_and_slack_only():
    """However long a row grows, its buffers have chunk_size + slack columns, and its capacity says so."""
    schedule = Schedule((7,), 3, 0)
    schedule.join()
    assert schedule.batch.capacities(0) == (3,)
    for count in (4, 20, 1, 100):
        schedule.step({0}, count, None)
        assert {array.shape[2] for array in schedule.batch.arrays} <= {8, 10}
    assert schedule.batch.capacities(0) == (10,)
    schedule.batch.leave(0)
    assert schedule.batch.nbytes == 0


def test_an_extracted_row_holds_its_last_chunk():
    """The single cache starts at its chunk's first position and takes no more bytes than one that was alone."""
    schedule = Schedule((300,), 16, 0)
    schedule.join()
    for count in (200, 100, 1, 511):
        schedule.step({0}, count, None)
        [mine], [own] = schedule.batch.extract(0), schedule.alone[0]
        own.maybe_trim_front()
        assert mine.start_position == (mine.offset - 1) // 300 * 300
        assert mine.nbytes <= own.nbytes


def filled(cache, count, *, trimmed=0):
    arrays = [mx.ones((1, 2, count, 32)) for _ in range(3)]
    attend(cache, *arrays, scale=1.0)
    attend(cache, *(array[:, :, :1] for array in arrays), scale=1.0)
    cache.trim(trimmed)
    return cache


REFUSED = {
    "a chunk of none": (lambda: ChunkedRowBatch(1, max_rows=1, chunk_size=0), InvalidGeometry),
    "a negative slack": (lambda: ChunkedRowBatch(1, max_rows=1, chunk_size=4, slack=-1), InvalidGeometry),
    "a ring": (lambda: ChunkedRowBatch(1, max_rows=1, chunk_size=6).join_caches([RotatingKVCache(6)]), InvalidGeometry),
    "another chunk size": (
        lambda: ChunkedRowBatch(1, max_rows=1, chunk_size=6).join_caches([filled(ChunkedKVCache(7), 3)]),
        InvalidGeometry,
    ),
    "a trimmed cache without its last chunk": (
        lambda: ChunkedRowBatch(1, max_rows=1, chunk_size=10).join_caches([filled(ChunkedKVCache(10), 15, trimmed=6)]),
        InvalidGeometry,
    ),
    "a merge": (lambda: merge_caches([ChunkedKVCache(6)]), UnsupportedCache),
}


@pytest.mark.parametrize(("refused", "error"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_wrong_is_refused(refused, error):
    """Sizes out of range and caches that do not fit are typed errors."""
    with pytest.raises(error):
        refused()
