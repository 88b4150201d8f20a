"""Laws of `RowBatch`: whatever joins, leaves or rolls back around it, a row is the row alone."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvcache import (
    CapacityClasses,
    EmptyCache,
    IntegrityError,
    InvalidGeometry,
    InvalidLength,
    InvalidSlots,
    KVCache,
    RowBatch,
    SlotsExhausted,
    attend,
)
from headrace_kvcache.buffers import SlotBuffers

NUM_LAYERS = 2
MAX_ROWS = 4
HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 4, 2, 8, 6

CLASSES = [CapacityClasses(), CapacityClasses(capacities=(2, 6)), CapacityClasses(capacities=(300, 301, 700))]

OPERATIONS = st.one_of(
    st.tuples(st.just("join"), st.sampled_from([0, 0, 5, 400])),
    st.tuples(st.just("leave"), st.integers(0, 3)),
    st.tuples(st.just("rollback"), st.integers(0, 3), st.floats(0, 1)),
    st.tuples(
        st.just("step"),
        st.sets(st.integers(0, 3), min_size=1),
        # 300 passes the first capacity of 256.
        st.sampled_from([1, 1, 1, 2, 5, 300]),
        st.lists(st.floats(0, 1), min_size=4, max_size=4) | st.none(),
    ),
)


class Schedule:
    """Drives a batch and, beside it, one lone cache per row and layer."""

    def __init__(self, seed, dtype=mx.float32, classes=CLASSES[0], **attention):
        self.batch = RowBatch(NUM_LAYERS, max_rows=MAX_ROWS, classes=classes)
        self.alone = {}
        self.random = np.random.default_rng(seed)
        self.dtype = dtype
        self.attention = {"scale": HEAD_DIM**-0.5, **attention}
        self.worst = 0.0

    def join(self, num_tokens=0):
        if len(self.alone) < MAX_ROWS:
            slot = self.batch.join(num_tokens=num_tokens)
            assert slot == min(set(range(MAX_ROWS)) - set(self.alone))
            self.alone[slot] = [KVCache() for _ in range(NUM_LAYERS)]

    def leave(self, which):
        if which in self.alone:
            self.batch.leave(which)
            del self.alone[which]

    def rollback(self, which, share):
        if which in self.alone:
            end = int(self.batch.end(which) * share)
            self.batch.set_end(which, end)
            for cache in self.alone[which]:
                cache.trim(cache.offset - end)

    def arrays(self, num_rows, num_tokens):
        shapes = [(HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM)]
        return [
            mx.array(self.random.normal(size=(num_rows, heads, num_tokens, size)).astype(np.float32)).astype(self.dtype)
            for heads, size in shapes
        ]

    def step(self, which, num_tokens, shares):
        slots = sorted(which & set(self.alone))
        if not slots:
            return
        counts = [num_tokens if shares is None else 1 + int((num_tokens - 1) * shares[slot]) for slot in slots]
        views = self.batch.view(slots, num_tokens, lengths=None if shares is None else counts)
        assert views[0].offset.tolist() == [self.batch.end(slot) for slot in slots]
        for layer, view in enumerate(views):
            q, k, v = self.arrays(len(slots), num_tokens)
            together = attend(view, q, k, v, **self.attention)
            assert together.dtype == self.dtype
            for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
                own = [array[row : row + 1, :, :count] for array in (q, k, v)]
                lone = attend(self.alone[slot][layer], *own, **self.attention)
                gap = mx.abs(lone - together[row : row + 1, :, :count]).max().item()
                self.worst = max(self.worst, gap)
        self.batch.advance(slots, num_tokens if shares is None else counts)

    def check(self):
        self.batch.check_integrity()
        assert self.batch.joined == tuple(sorted(self.alone))
        for slot, caches in self.alone.items():
            assert self.batch.end(slot) == caches[0].offset
            assert self.batch.capacity(slot) >= caches[0].offset
            if caches[0].offset:
                for mine, cache in zip(self.batch.contents(slot), caches, strict=True):
                    for one, lone in zip(mine, cache.keys_and_values(), strict=True):
                        assert mx.array_equal(one, lone), "cached bytes differ"


def run(schedule, operations):
    schedule.join()
    for name, *arguments in operations:
        getattr(schedule, name)(*arguments)
        schedule.check()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(OPERATIONS, max_size=14),
    st.integers(0, 2**16),
    st.sampled_from([None, 1, 3, 40]),
    st.sampled_from(CLASSES),
)
def test_a_row_in_a_batch_equals_the_row_alone(operations, seed, window, classes):
    """float32: attention within 1e-5, cached bytes equal, over joins, appends, leaves, rollbacks and class changes."""
    schedule = Schedule(seed, window=window, classes=classes)
    run(schedule, operations)
    assert schedule.worst <= 1e-5


@settings(max_examples=8, deadline=None)
@given(st.lists(OPERATIONS, max_size=10), st.integers(0, 2**16), st.sampled_from([mx.bfloat16, mx.float16]))
def test_a_row_in_a_batch_equals_the_row_alone_in_half_precision(operations, seed, dtype):
    """Outputs of size one may differ by two units of bfloat16's last place, 2 * 2**-7: sums associate differently."""
    schedule = Schedule(seed, dtype)
    run(schedule, operations)
    assert schedule.worst <= 2**-6


@settings(max_examples=6, deadline=None)
@given(st.lists(OPERATIONS, max_size=8), st.integers(0, 2**16))
def test_sinks_and_softcap_batch_too(operations, seed):
    """The masked, manual path keeps the law."""
    schedule = Schedule(seed, window=5, softcap=2.0, sinks=mx.array([0.5, -1.0, 2.0, 0.0]))
    run(schedule, operations)
    assert schedule.worst <= 1e-5


def filled(ends, *, layers=1, max_rows=8):
    batch = RowBatch(layers, max_rows=max_rows)
    for end in ends:
        slot = batch.join()
        if end:
            for view in batch.view([slot], end):
                attend(view, mx.ones((1, 1, end, 4)), mx.ones((1, 1, end, 4)), mx.ones((1, 1, end, 4)), scale=1.0)
            batch.advance([slot], end)
    return batch


def append_to(batch, slot, count):
    [view] = batch.view([slot], count)
    attend(view, *[mx.ones((1, 1, count, 4))] * 3, scale=1.0)
    batch.advance([slot], count)


def test_slots_and_capacity_grow_by_doubling_and_go_with_the_last_row():
    """S is a power of two up to max_rows, C a power of two from 256; the last leave releases everything."""
    batch = RowBatch(1, max_rows=3)
    assert batch.nbytes == 0
    for expected_slots, end, expected_capacity in [(1, 256, 256), (2, 257, 512), (3, 1, 512)]:
        append_to(batch, batch.join(), end)
        assert batch.arrays[0].shape == (expected_slots, 1, expected_capacity, 4)
    for slot in (1, 0, 2):
        assert batch.nbytes == 2 * 3 * 512 * 4 * 4
        batch.leave(slot)
    assert batch.nbytes == 0
    batch.check_integrity()
    assert batch.join() == 0


def test_a_row_moves_up_when_it_outgrows_its_class_and_its_slot_stays():
    """Classes 4, 16, then doubling: the mover's bytes move, its neighbour's buffers and both slots stay."""
    batch = RowBatch(1, max_rows=2, classes=CapacityClasses(capacities=(4, 16)))
    short, long = batch.join(), batch.join()
    append_to(batch, short, 4)
    for count, capacity in [(4, 4), (1, 16), (12, 32), (20, 64)]:
        append_to(batch, long, count)
        assert batch.capacity(long) == capacity
        assert batch.capacity(short) == 4
        batch.check_integrity()
    assert {array.shape[2] for array in batch.arrays} == {4, 64}
    batch.leave(long)
    assert {array.shape[2] for array in batch.arrays} == {4}


def test_a_short_row_never_attends_over_a_long_rows_columns():
    """Rows of one step in two classes: the masks of the short row's run span its own columns only."""
    batch = RowBatch(1, max_rows=2, classes=CapacityClasses(capacities=(4, 64)))
    short, long = batch.join(), batch.join()
    append_to(batch, short, 2)
    append_to(batch, long, 50)
    [view] = batch.view([short, long], 1)
    spans = [run.span(None)[0] for group in view._step.groups for run in group.placement.runs]
    assert spans == [range(3), range(51)]


def test_a_row_that_cannot_move_stays_where_it_is(monkeypatch):
    """A copy that fails leaves the row, its bytes and the free lists as they were."""
    batch = RowBatch(2, max_rows=2, classes=CapacityClasses(capacities=(4, 16)))
    slot = batch.join()
    for view in batch.view([slot], 4):
        attend(view, *[mx.ones((1, 1, 4, 4))] * 3, scale=1.0)
    batch.advance([slot], 4)
    before = batch.contents(slot)

    def fail(*_, **__):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(SlotBuffers, "reserve", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            batch.view([slot], 1)
    batch.check_integrity()
    assert (batch.end(slot), batch.capacity(slot)) == (4, 4)
    assert all(
        mx.array_equal(one, other)
        for now, then in zip(batch.contents(slot), before, strict=True)
        for one, other in zip(now, then, strict=True)
    )
    batch.view([slot], 1)
    assert batch.capacity(slot) == 16


def test_layers_share_one_offset_array():
    """The offset is built once per view, not once per layer."""
    views = filled([3, 5], layers=3).view([0, 1], 1)
    assert views[0].offset is views[2].offset


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_attending_without_appending_sees_the_last_positions(num_tokens):
    """keys=values=None: the queries are the last T positions, after an append in this step or in an earlier one."""
    batch, schedule = RowBatch(1, max_rows=2), Schedule(0)
    batch.join(), batch.join()
    [view] = batch.view([0, 1], 3, lengths=[3, 2])
    attend(view, *schedule.arrays(2, 3), scale=0.5)
    batch.advance([0, 1], [3, 2])
    q, k, v = schedule.arrays(2, num_tokens)
    [view] = batch.view([0, 1], num_tokens)
    appended = attend(view, q, k, v, scale=0.5)
    assert mx.array_equal(attend(view, q, None, None, scale=0.5), appended)
    batch.advance([0, 1], num_tokens)
    [view] = batch.view([0, 1], num_tokens)
    assert mx.array_equal(attend(view, q, None, None, scale=0.5), appended)
    assert batch.end(0) == 3 + num_tokens


REFUSED = {
    "no slots": (lambda batch: batch.view([], 1), InvalidSlots),
    "descending slots": (lambda batch: batch.view([1, 0], 1), InvalidSlots),
    "a slot twice": (lambda batch: batch.view([0, 0], 1), InvalidSlots),
    "a free slot": (lambda batch: batch.view([2], 1), InvalidSlots),
    "a slot out of range": (lambda batch: batch.view([8], 1), InvalidSlots),
    "a bool for a slot": (lambda batch: batch.view([True], 1), InvalidSlots),
    "no tokens": (lambda batch: batch.view([0], 0), InvalidLength),
    "a float of tokens": (lambda batch: batch.view([0], 1.0), InvalidLength),
    "too few lengths": (lambda batch: batch.view([0, 1], 2, lengths=[1]), InvalidLength),
    "a length of none": (lambda batch: batch.view([0, 1], 2, lengths=[0, 1]), InvalidLength),
    "a length beyond the step": (lambda batch: batch.view([0, 1], 2, lengths=[3, 1]), InvalidLength),
    "an advance without room": (lambda batch: batch.advance([0], 254), InvalidLength),
    "too many counts": (lambda batch: batch.advance([0], [1, 1]), InvalidLength),
    "leaving a free slot": (lambda batch: batch.leave(2), InvalidSlots),
    "the end of a negative slot": (lambda batch: batch.end(-1), InvalidSlots),
    "an end beyond the row": (lambda batch: batch.set_end(0, 4), InvalidLength),
    "a negative end": (lambda batch: batch.set_end(0, -1), InvalidLength),
    "queries of two rows for one": (lambda batch: look(batch, 2, 1, 1), InvalidGeometry),
    "queries before the row's start": (lambda batch: look(batch, 1, 4, 4), EmptyCache),
    "another head size": (lambda batch: append(batch, 1, 5), InvalidGeometry),
    "other heads": (lambda batch: append(batch, 2, 4), InvalidGeometry),
    "another dtype": (lambda batch: append(batch, 1, 4, mx.float16), InvalidGeometry),
}


def look(batch, num_rows, num_queries, num_tokens):
    batch.view([0], num_tokens)[0].attend(mx.ones((num_rows, 1, num_queries, 4)), None, None, scale=1.0)


def append(batch, heads, size, dtype=mx.float32):
    array = mx.ones((1, heads, 1, size), dtype)
    batch.view([0], 1)[0].attend(array, array, array, scale=1.0)


@pytest.mark.parametrize(("refused", "error"), REFUSED.values(), ids=REFUSED)
def test_a_refused_operation_changes_nothing(refused, error):
    """Wrong slots, counts and shapes are typed errors; books and buffers stay as they were."""
    batch = filled([3, 5])
    before = [np.array(array) for array in batch.arrays]
    with pytest.raises(error) as caught:
        refused(batch)
    assert isinstance(caught.value, (ValueError, RuntimeError))
    assert batch.joined == (0, 1)
    assert [batch.end(slot) for slot in batch.joined] == [3, 5]
    assert all(np.array_equal(old, np.array(new)) for old, new in zip(before, batch.arrays, strict=True))


def test_a_full_batch_refuses_another_row():
    """The slot count is a promise to the memory budget."""
    batch = filled([0, 0], max_rows=2)
    with pytest.raises(SlotsExhausted, match="all 2 slots"):
        batch.join()


@pytest.mark.parametrize("arguments", [(0, 1), (1, 0), (1.5, 1), (1, True)])
def test_a_batch_needs_layers_and_rows(arguments):
    """Counts are integers of at least 1."""
    with pytest.raises(InvalidGeometry):
        RowBatch(arguments[0], max_rows=arguments[1])


def test_integrity_check_finds_a_row_beyond_its_buffers():
    """Books that promise more than the buffers hold are reported, not read."""
    batch = filled([3])
    batch._table.row(0).end = 257
    with pytest.raises(IntegrityError, match="end=257"):
        batch.check_integrity()
