"""Laws of a whole model's slots: every layer, whatever its kind, is the single-row cache fed the same."""

import copy
import gc

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvcache import (
    CacheList,
    CapacityClasses,
    ChunkedKVCache,
    InvalidCountError,
    InvalidGeometry,
    InvalidLength,
    KVCache,
    QuantizedKVCache,
    RecurrentCache,
    RotatingKVCache,
    RotatingQuantizedKVCache,
    RoundRefusedError,
    SlotsExhausted,
    UnsupportedCache,
    attend,
    make_row_batch,
)
from headrace_kvcache.single_rows import read_single

MAX_ROWS = 4
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
SMALL = CapacityClasses(capacities=(3, 10))

MODELS = {
    "plain and sliding": lambda: [KVCache(), RotatingKVCache(6), KVCache(), RotatingKVCache(6), RotatingKVCache(9, 2)],
    "hybrid": lambda: [RecurrentCache(2), KVCache(), RecurrentCache(2)],
    "chunked and plain": lambda: [ChunkedKVCache(6), ChunkedKVCache(6), KVCache(), ChunkedKVCache(9)],
    "lists": lambda: [CacheList(KVCache(), RotatingKVCache(5)), CacheList(KVCache(), RecurrentCache(2))],
    "quantized": lambda: [
        QuantizedKVCache(bits=8, group_size=32),
        RotatingQuantizedKVCache(7, 1, bits=4, group_size=32),
        QuantizedKVCache(bits=4, group_size=32),
    ],
    "quantized but for one": lambda: [KVCache(), QuantizedKVCache(bits=8, group_size=32), RecurrentCache(2)],
}

OPERATIONS = st.one_of(
    st.tuples(st.just("join")),
    st.tuples(st.just("leave"), st.integers(0, 3)),
    st.tuples(st.just("swap"), st.integers(0, 3)),
    st.tuples(
        st.just("step"),
        st.sets(st.integers(0, 3), min_size=1),
        st.sampled_from([1, 1, 2, 4, 12]),
        st.lists(st.floats(0, 1), min_size=4, max_size=4) | st.none(),
    ),
    st.tuples(
        st.just("round"),
        st.sets(st.integers(0, 3), min_size=1),
        st.integers(0, 3),
        st.lists(st.floats(0, 1), min_size=4, max_size=4),
    ),
)


def leaves(caches):
    for cache in caches:
        if isinstance(cache, CacheList) or hasattr(cache, "caches"):
            yield from leaves(cache.caches)
        else:
            yield cache


def sum_up(arrays, inputs, mask):
    """A toy recurrence: the last two real inputs, and a decaying float32 sum."""
    tail, total = arrays
    tail = mx.zeros((inputs.shape[0], 2, inputs.shape[2])) if tail is None else tail
    total = mx.zeros((inputs.shape[0], inputs.shape[2])) if total is None else total
    outputs = []
    for t in range(inputs.shape[1]):
        real = mx.ones((inputs.shape[0], 1), mx.bool_) if mask is None else mask[:, t : t + 1]
        total = mx.where(real, total * 0.5 + inputs[:, t] + tail[:, 0], total)
        tail = mx.where(real[..., None], mx.stack([tail[:, 1], inputs[:, t]], 1), tail)
        outputs.append(total)
    return [tail, total], mx.stack(outputs, 1)


def recur(cache, inputs):
    before = [cache[0], cache[1]]
    arrays, outputs = sum_up(before, inputs, cache.make_mask(inputs.shape[1]))
    cache[0], cache[1] = arrays
    cache.advance(inputs.shape[1])
    if hasattr(cache, "record"):
        cache.record(lambda states, kept: sum_up(states, inputs, kept.mask(inputs.shape[1]))[0])
    return outputs


def run_layer(cache, arrays, *, is_recurrent):
    if is_recurrent:
        return recur(cache, arrays[0][:, 0])
    return attend(cache, *arrays, scale=0.2).swapaxes(1, 2)


class Schedule:
    """Drives a model's slots and, beside them, each row's own single-row caches."""

    def __init__(self, make_caches, seed, **options):
        self.make_caches = make_caches
        self.batch = make_row_batch(make_caches(), max_rows=MAX_ROWS, classes=SMALL, slack=4, **options)
        self.are_recurrent = [isinstance(cache, RecurrentCache) for cache in leaves(make_caches())]
        self.alone = {}
        self.random = np.random.default_rng(seed)
        self.worst = 0.0

    def join(self):
        if len(self.alone) < MAX_ROWS:
            self.alone[self.batch.join()] = self.make_caches()

    def leave(self, slot):
        if self.alone.pop(slot, None):
            self.batch.leave(slot)

    def swap(self, slot):
        """A row leaves as single-row caches and comes back from those that were alone."""
        if slot in self.alone:
            extracted = self.batch.extract(slot)
            self.batch.leave(slot)
            lone = self.alone.pop(slot)
            self.alone[self.batch.join_caches(lone)] = extracted

    def arrays(self, num_rows, num_tokens):
        return [
            mx.array(self.random.normal(size=(num_rows, heads, num_tokens, HEAD_DIM)).astype(np.float32))
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]

    def forward(self, slots, num_tokens, counts, *, lengths=None):
        """Run the batch over T positions and each row alone over the first `counts`."""
        views = list(leaves(self.batch.view(slots, num_tokens, lengths=lengths)))
        for layer, (view, is_recurrent) in enumerate(zip(views, self.are_recurrent, strict=True)):
            assert view.offset.tolist() == [self.batch.end(slot) for slot in slots]
            arrays = self.arrays(len(slots), num_tokens)
            together = run_layer(view, arrays, is_recurrent=is_recurrent)
            for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
                if count:
                    own = [array[row : row + 1, :, :count] for array in arrays]
                    lone = run_layer(list(leaves(self.alone[slot]))[layer], own, is_recurrent=is_recurrent)
                    self.worst = max(self.worst, mx.abs(lone - together[row : row + 1, :count]).max().item())
        self.batch.advance(slots, num_tokens if lengths is None else lengths)

    def step(self, which, num_tokens, shares):
        slots = sorted(which & set(self.alone))
        if slots:
            counts = [num_tokens if shares is None else 1 + int((num_tokens - 1) * shares[slot]) for slot in slots]
            self.forward(slots, num_tokens, counts, lengths=None if shares is None else counts)

    def round(self, which, drafts, shares):
        slots = sorted(which & set(self.alone))
        if not slots:
            return
        keeps = [int((drafts + 1) * shares[slot]) for slot in slots]
        assert self.batch.spec_round_fits(drafts, slots=slots)
        self.batch.spec_round_begin(slots=slots)
        self.forward(slots, drafts + 1, keeps)
        self.batch.spec_round_rollback(keeps)

    def check(self):
        self.batch.check_integrity()
        assert self.batch.joined == tuple(sorted(self.alone))
        for slot, lone in self.alone.items():
            extracted = list(leaves(self.batch.extract(slot)))
            for mine, own in zip(extracted, leaves(lone), strict=True):
                assert type(mine) is type(own)
                assert mine.offset == own.offset == self.batch.end(slot)
                assert same_bytes(mine, own)


def same_bytes(mine, own):
    if not own.offset:
        return mine.nbytes == 0
    if isinstance(own, RecurrentCache):
        pairs = zip(mine.state[0], own.state[0], strict=True)
    else:
        pairs = zip(read_single(mine).fields, read_single(own).fields, strict=True)
    return all(mx.array_equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_copy_without_the_first_positions_is_the_rest_of_a_whole_one(name):
    """Plain and quantized layers hold the others alone; rings, chunks and states are copied as they are."""
    run = Schedule(MODELS[name], 3)
    for _ in range(2):
        run.join()
    run.forward([0, 1], 11, [11, 11])
    whole = list(leaves(run.batch.extract(1)))
    for first in (0, 1, 7, 11):
        for cache, full in zip(leaves(run.batch.extract(1, first=first)), whole, strict=True):
            assert type(cache) is type(full)
            if isinstance(full, KVCache | QuantizedKVCache):
                assert cache.offset == 11 - first
                pairs = zip(read_single(cache).fields, read_single(full).fields, strict=True) if first < 11 else ()
                assert all(mx.array_equal(one, two[..., first:, :]) for one, two in pairs)
                continue
            assert cache.offset == full.offset
            one, two = (
                each.state[0] if isinstance(full, RecurrentCache) else read_single(each).fields
                for each in (cache, full)
            )
            assert all(mx.array_equal(*pair) for pair in zip(one, two, strict=True))
    for first in (-1, 12, True, 1.0):
        with pytest.raises(InvalidLength):
            run.batch.extract(1, first=first)


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=15, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=12), seed=st.integers(0, 2**16))
def test_a_row_in_a_models_slots_equals_its_caches_alone(model, operations, seed):
    """Outputs within 2e-5 (float32), stored bytes equal, over steps, rounds with different keeps, leaves, swaps."""
    schedule = Schedule(MODELS[model], seed)
    schedule.join()
    for name, *arguments in operations:
        getattr(schedule, name)(*arguments)
        schedule.check()
    assert schedule.worst <= 2e-5


def test_extracted_caches_have_exactly_the_bytes_of_their_kind():
    """A row of n positions comes out in whole slabs, rings at most their window, as if never batched."""
    schedule = Schedule(lambda: [KVCache(), RotatingKVCache(300), QuantizedKVCache(bits=4, group_size=32)], 0)
    schedule.join()
    for count in (200, 56, 1, 300):
        schedule.step({0}, count, None)
        for mine, own in zip(schedule.batch.extract(0), schedule.alone[0], strict=True):
            at_rest = copy.copy(own)
            if isinstance(at_rest, RotatingKVCache):
                at_rest.compact()
            assert mine.nbytes == at_rest.nbytes


def test_layers_of_one_kind_share_one_batch():
    """Twelve layers of two kinds are two batches: masks and offsets are built once per kind."""
    batch = make_row_batch([KVCache() if layer % 6 == 5 else RotatingKVCache(8) for layer in range(12)], max_rows=2)
    batch.join()
    views = batch.view([0], 1)
    assert len({id(view.offset) for view in views}) == 2
    assert batch.num_layers == 12
    assert batch.capacities(0) == (24, 1024)


def test_rows_wait_for_their_conversion_and_keep_their_slot():
    """With `starts_unquantized`, only the quantized layers change at `convert`, to the bytes of mlx-lm's conversion."""
    schedule = Schedule(lambda: [KVCache(), KVCache(), RecurrentCache(2)], 5)
    kinds = [KVCache(), QuantizedKVCache(bits=8, group_size=32), RecurrentCache(2)]
    schedule.batch = make_row_batch(kinds, max_rows=MAX_ROWS, classes=SMALL, starts_unquantized=True)
    schedule.join(), schedule.join()
    schedule.step({0, 1}, 7, None)
    schedule.check()
    schedule.batch.convert(0)
    assert [schedule.batch.is_converted(slot) for slot in (0, 1)] == [True, False]
    schedule.alone[0][1] = schedule.alone[0][1].to_quantized(group_size=32, bits=8)
    for _ in range(3):
        schedule.step({0, 1}, 2, None)
        schedule.check()
    assert schedule.worst <= 2e-5


class Unknown:
    """No cache of this package."""


REFUSED = {
    "nothing": (lambda: make_row_batch([], max_rows=1), InvalidGeometry),
    "an unknown kind": (lambda: make_row_batch([Unknown()], max_rows=1), UnsupportedCache),
    "an unknown kind in a list": (lambda: make_row_batch([CacheList(KVCache(), Unknown())], max_rows=1), TypeError),
    "no rows": (lambda: make_row_batch([KVCache()], max_rows=0), InvalidGeometry),
}


@pytest.mark.parametrize(("refused", "error"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_share_slots_is_refused_when_made(refused, error):
    """An unknown kind raises instead of being routed somewhere."""
    with pytest.raises(error):
        refused()


def hybrid(seed=3):
    schedule = Schedule(MODELS["hybrid"], seed)
    schedule.join(), schedule.join()
    schedule.step({0, 1}, 5, [1.0, 0.5, 0.0, 0.0])
    return schedule


def forgetful(caches):
    other = copy.copy(caches[1])
    other.state = (*other.state[:2], other.offset - 1)
    return [caches[0], other, caches[2]]


REFUSED_CALLS = {
    "rolling a recurrent row back": (lambda s: s.batch.set_end(0, 4), InvalidLength),
    "advancing without a view": (lambda s: s.batch.advance([0], 1), InvalidLength),
    "advancing by a part of the view": (
        lambda s: (s.batch.view([0], 2), s.batch.advance([0], 1)),
        InvalidLength,
    ),
    "a cache less": (lambda s: s.batch.join_caches(s.batch.extract(0)[:2]), InvalidGeometry),
    "caches in another order": (lambda s: s.batch.join_caches(s.batch.extract(0)[::-1][1:] * 2), InvalidGeometry),
    "another kind": (lambda s: s.batch.join_caches([KVCache(), KVCache(), KVCache()]), UnsupportedCache),
    "caches that disagree": (lambda s: s.batch.join_caches(forgetful(s.batch.extract(0))), InvalidGeometry),
    "a rollback without a round": (lambda s: s.batch.spec_round_rollback(0), RoundRefusedError),
    "a negative draft": (lambda s: s.batch.spec_round_fits(-1), InvalidCountError),
    "a row too many": (lambda s: [s.batch.join_caches(s.batch.extract(0)) for _ in range(3)], SlotsExhausted),
}


@pytest.mark.parametrize(("refused", "error"), REFUSED_CALLS.values(), ids=REFUSED_CALLS)
def test_a_refused_operation_changes_nothing(refused, error):
    """Typed errors; rows, bytes and books of every kind stay as they were."""
    schedule = hybrid()
    with pytest.raises(error):
        refused(schedule)
    for slot in set(schedule.batch.joined) - {0, 1}:
        schedule.batch.leave(slot)
    schedule.check()
    schedule.step({0, 1}, 1, None)
    schedule.check()


def test_a_step_that_is_not_advanced_leaves_recurrent_rows_alone():
    """A forward that fails halfway has stored nothing."""
    schedule = hybrid()
    views = schedule.batch.view([0, 1], 2)
    recur(views[0], mx.ones((2, 2, HEAD_DIM)))
    schedule.check()


def test_a_layer_that_cannot_replay_refuses_the_rollback():
    """Nothing changes, and the round can still be committed."""
    schedule = hybrid()
    schedule.batch.spec_round_begin()
    views = schedule.batch.view([0, 1], 2)
    for view, is_recurrent in zip(views, schedule.are_recurrent, strict=True):
        arrays = schedule.arrays(2, 2)
        if is_recurrent:
            view[0], view[1] = mx.ones((2, 2, HEAD_DIM)), mx.ones((2, HEAD_DIM))
        else:
            attend(view, *arrays, scale=1.0)
    schedule.batch.advance([0, 1], 2)
    with pytest.raises(RoundRefusedError, match="replay"):
        schedule.batch.spec_round_rollback([1, 2])
    assert [schedule.batch.end(slot) for slot in (0, 1)] == [7, 5]
    schedule.batch.spec_round_commit()
    schedule.batch.check_integrity()


def test_a_row_that_joins_in_the_place_of_one_of_the_round_is_not_in_it():
    """A step over the slots that the round began with is refused once another row has one of them."""
    batch = make_row_batch([RecurrentCache(2)], max_rows=3)
    slots = [batch.join() for _ in range(3)]
    for view in batch.view(slots, 2):
        recur(view, mx.ones((3, 2, HEAD_DIM)))
    batch.advance(slots, 2)
    before = batch.extract(2)[0][1]
    batch.spec_round_begin()
    for view in batch.view(slots, 1):
        recur(view, mx.ones((3, 1, HEAD_DIM)))
    batch.advance(slots, 1)
    batch.leave(1)
    assert batch.join() == 1
    for step in (slots, [0, 2]):
        with pytest.raises(RoundRefusedError, match=r"of which \(0, 2\) are left"):
            batch.view(step, 1)
    for view in batch.view([1], 2):
        recur(view, mx.ones((1, 2, HEAD_DIM)))
    batch.advance([1], 2)
    batch.spec_round_rollback(0)
    batch.check_integrity()
    for slot in slots:
        assert batch.end(slot) == 2
        assert mx.array_equal(batch.extract(slot)[0][1], before)


@pytest.mark.parametrize("model", MODELS)
def test_a_thousand_joins_and_leaves_leak_nothing(model):
    """Active memory after the last leave is what it was before the first join."""
    schedule = Schedule(MODELS[model], 3)
    schedule.join()
    schedule.step({0}, 12, None)
    caches = schedule.batch.extract(0)
    schedule.batch.leave(0)
    gc.collect()
    before = mx.get_active_memory()
    for turn in range(1000):
        for slot in [schedule.batch.join_caches(caches) for _ in range(1 + turn % MAX_ROWS)]:
            schedule.batch.leave(slot)
    assert schedule.batch.nbytes == 0
    assert mx.get_active_memory() == before
