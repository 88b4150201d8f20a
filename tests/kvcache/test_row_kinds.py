"""Laws of slots of every attention kind: a row is an uncached forward over its own history, quantized alike."""

import gc

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvcache import (
    CapacityClasses,
    EmptyCache,
    InvalidCountError,
    InvalidGeometry,
    InvalidLength,
    QuantizedRowBatch,
    RotatingQuantizedRowBatch,
    RotatingRowBatch,
    RoundRefusedError,
    RowBatch,
    SlotsExhausted,
    attend,
)

NUM_LAYERS = 2
MAX_ROWS = 4
HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 4, 2, 32, 64
SMALL = CapacityClasses(capacities=(3, 10))

KINDS = {
    "plain": lambda: RowBatch(NUM_LAYERS, max_rows=MAX_ROWS, classes=SMALL),
    "quantized 8": lambda: QuantizedRowBatch(NUM_LAYERS, max_rows=MAX_ROWS, bits=8, group_size=32, classes=SMALL),
    "quantized 3": lambda: QuantizedRowBatch(NUM_LAYERS, max_rows=MAX_ROWS, bits=3, group_size=32),
    "converted 8": lambda: QuantizedRowBatch(
        NUM_LAYERS, max_rows=MAX_ROWS, group_size=32, starts_unquantized=True, classes=SMALL
    ),
    "ring": lambda: RotatingRowBatch(NUM_LAYERS, max_rows=MAX_ROWS, window=7, slack=3),
    "ring without slack": lambda: RotatingRowBatch(NUM_LAYERS, max_rows=MAX_ROWS, window=5, slack=0, classes=SMALL),
    "ring with sinks": lambda: RotatingRowBatch(
        NUM_LAYERS, max_rows=MAX_ROWS, window=7, keep=2, slack=3, classes=SMALL
    ),
    "quantized ring": lambda: RotatingQuantizedRowBatch(
        NUM_LAYERS, max_rows=MAX_ROWS, window=6, keep=1, slack=2, bits=4, group_size=32, classes=SMALL
    ),
    "converted ring": lambda: RotatingQuantizedRowBatch(
        NUM_LAYERS, max_rows=MAX_ROWS, window=6, slack=2, bits=6, group_size=32, starts_unquantized=True
    ),
}

OPERATIONS = st.one_of(
    st.tuples(st.just("join")),
    st.tuples(st.just("leave"), st.integers(0, 3)),
    st.tuples(st.just("rollback"), st.integers(0, 3), st.integers(1, 6)),
    st.tuples(st.just("move_out_and_in"), st.integers(0, 3)),
    st.tuples(st.just("convert"), st.integers(0, 3)),
    st.tuples(
        st.just("step"),
        st.sets(st.integers(0, 3), min_size=1),
        st.sampled_from([1, 1, 1, 2, 4, 9, 20]),
        st.lists(st.floats(0, 1), min_size=4, max_size=4) | st.none(),
    ),
)


class Schedule:
    """Drives a batch and, beside it, every row's whole history of keys and values."""

    def __init__(self, batch, seed, **attention):
        self.batch = batch
        self.columns, self.forms = batch._columns, batch._rooms.forms
        self.histories = {}
        self.random = np.random.default_rng(seed)
        self.attention = attention
        self.worst = 0.0

    def join(self):
        if len(self.histories) < MAX_ROWS:
            self.histories[self.batch.join()] = [[] for _ in range(NUM_LAYERS)]

    def leave(self, slot):
        if self.histories.pop(slot, None):
            self.batch.leave(slot)

    def rollback(self, slot, count):
        if slot not in self.histories:
            return
        end = max(0, self.batch.end(slot) - count)
        if end < self.batch.least_end(slot):
            with pytest.raises(InvalidLength):
                self.batch.set_end(slot, end)
            return
        self.batch.set_end(slot, end)
        for history in self.histories[slot]:
            del history[end:]

    def move_out_and_in(self, slot):
        if slot in self.histories and self.batch.end(slot):
            self.convert(slot)
            contents, end = self.batch.contents(slot), self.batch.end(slot)
            self.batch.leave(slot)
            history = self.histories.pop(slot)
            self.histories[self.batch.join_contents(end, contents)] = history

    def convert(self, slot):
        """Quantizing what is stored equals having stored the quantized from the start."""
        if slot not in self.histories or self.batch.is_converted(slot):
            return
        if not self.batch.end(slot):
            with pytest.raises(EmptyCache):
                self.batch.convert(slot)
            return
        self.batch.convert(slot)
        for history in self.histories[slot]:
            for index, (key, value, *_) in enumerate(history):
                keys, values = self.stored(self.forms[-1], key[None, :, None], value[None, :, None])
                history[index] = key, value, keys[0, :, 0], values[0, :, 0]

    def form(self, slot):
        return self.forms[-1 if self.batch.is_converted(slot) else 0]

    def arrays(self, num_rows, num_tokens):
        shapes = [(HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM)]
        return [
            mx.array(self.random.normal(size=(num_rows, heads, num_tokens, size)).astype(np.float32))
            for heads, size in shapes
        ]

    def step(self, which, num_tokens, shares):
        slots = sorted(which & set(self.histories))
        if not slots:
            return
        counts = [num_tokens if shares is None else 1 + int((num_tokens - 1) * shares[slot]) for slot in slots]
        views = self.batch.view(slots, num_tokens, lengths=None if shares is None else counts)
        assert views[0].offset.tolist() == [self.batch.end(slot) for slot in slots]
        for layer, view in enumerate(views):
            q, k, v = self.arrays(len(slots), num_tokens)
            output = np.array(attend(view, q, k, v, scale=0.2, **self.attention))
            again = np.array(attend(view, q, None, None, scale=0.2, **self.attention))
            assert np.array_equal(output, again), "attending without appending must see the same"
            for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
                history = self.histories[slot][layer]
                start = len(history)
                keys, values = self.stored(self.form(slot), k, v)
                history += [(k[row, :, t], v[row, :, t], keys[row][:, t], values[row][:, t]) for t in range(count)]
                for t in range(count):
                    expected = self.expected(np.array(q[row, :, t]), history, start + t)
                    self.worst = max(self.worst, float(np.abs(expected - output[row, :, t]).max()))
        self.batch.advance(slots, num_tokens if shares is None else counts)

    def stored(self, form, k, v):
        if not hasattr(form, "bits"):
            return np.array(k), np.array(v)
        packed = form.encode(k, v)
        both = packed[:3], packed[3:]
        return [np.array(mx.dequantize(*t, bits=form.bits, group_size=form.group_size)) for t in both]

    def sees(self, position, other):
        if not hasattr(self.columns, "window"):
            return True
        return other < self.columns.keep or position - other < self.columns.window - self.columns.keep

    def expected(self, query, history, position):
        seen = [other for other in range(position + 1) if self.sees(position, other)]
        keys = np.stack([history[other][2] for other in seen], 1)
        values = np.stack([history[other][3] for other in seen], 1)
        grouped = query.reshape(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        scores = np.einsum("hgd,hld->hgl", grouped, keys) * 0.2
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hgl,hld->hgd", weights, values).reshape(HEADS, VALUE_DIM)

    def check(self):
        self.batch.check_integrity()
        assert self.batch.joined == tuple(sorted(self.histories))
        for slot, layers in self.histories.items():
            end = len(layers[0])
            assert self.batch.end(slot) == end
            if not end:
                continue
            positions = [p for low, high in self.columns.held(end) for p in range(low, high)]
            assert {p for p in range(end) if self.sees(end, p)} <= set(positions)
            for mine, history in zip(self.batch.contents(slot), layers, strict=True):
                keys = mx.stack([history[p][0] for p in positions], 1)[None]
                values = mx.stack([history[p][1] for p in positions], 1)[None]
                for one, other in zip(mine, self.form(slot).encode(keys, values), strict=True):
                    assert mx.array_equal(one, other), "cached bytes differ"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=16), seed=st.integers(0, 2**16))
def test_a_row_is_an_uncached_forward_over_its_history(kind, operations, seed):
    """Attention within 2e-5 (float32), stored bytes equal, over joins, appends, rollbacks, leaves, extracts."""
    schedule = Schedule(KINDS[kind](), seed)
    schedule.join()
    for name, *arguments in operations:
        getattr(schedule, name)(*arguments)
        schedule.check()
    assert schedule.worst <= 2e-5


def append_as(schedule, other, slot, start):
    """Append to a row what another schedule's row holds from `start` on, in one step."""
    count = other.batch.end(slot) - start
    for layer, view in enumerate(schedule.batch.view([slot], count)):
        history = other.histories[slot][layer]
        keys, values = (mx.stack([each[side] for each in history[start:]], 1)[None] for side in (0, 1))
        attend(view, mx.zeros((1, HEADS, count, HEAD_DIM)), keys, values, scale=0.2)
        schedule.histories[slot][layer] = list(history)
    schedule.batch.advance([slot], count)


@pytest.mark.parametrize("kind", ["plain", "ring", "ring with sinks", "quantized ring", "converted 8"])
@pytest.mark.parametrize("end", [3, 7, 9, 10, 11, 25])
def test_a_round_with_different_keeps_equals_a_batch_that_never_drafted(kind, end):
    """Offset, attention and contents after a rollback are those of rows that only ever appended what was kept."""
    drafted, plain = Schedule(KINDS[kind](), 1), Schedule(KINDS[kind](), 1)
    drafts = 1
    for schedule in (drafted, plain):
        schedule.join(), schedule.join(), schedule.join()
        schedule.step({0, 1, 2}, end, None)
    assert drafted.batch.spec_round_fits(drafts)
    drafted.batch.spec_round_begin()
    drafted.step({0, 1, 2}, drafts + 1, None)
    drafted.batch.spec_round_rollback([0, 1, 2])
    for slot, kept in enumerate([0, 1, 2]):
        for history in drafted.histories[slot]:
            del history[end + kept :]
    for slot in (1, 2):
        append_as(plain, drafted, slot, end)
    for schedule in (drafted, plain):
        schedule.random = np.random.default_rng(7)
        assert schedule.batch.view([0, 1, 2], 1)[0].offset.tolist() == [end, end + 1, end + 2]
        schedule.check()
        for _ in range(3):
            schedule.step({0, 1, 2}, 1, None)
        schedule.check()
        assert schedule.worst <= 2e-5
    assert same_contents(drafted.batch, plain.batch, slots=range(3))


def same_contents(batch, other, slots):
    fields = [
        pair
        for slot in slots
        for mine, theirs in zip(batch.contents(slot), other.contents(slot), strict=True)
        for pair in zip(mine, theirs, strict=True)
    ]
    return all(mx.array_equal(one, two) for one, two in fields)


def test_rounds_are_checked():
    """A round begins once, ends once, and keeps what was appended at most; a refusal leaves it open."""
    schedule = Schedule(KINDS["ring"](), 1)
    batch = schedule.batch
    schedule.join(), schedule.join()
    schedule.step({0, 1}, 20, None)
    assert batch.spec_round_fits(2)
    assert not batch.spec_round_fits(3)
    for refused in (batch.spec_round_commit, lambda: batch.spec_round_rollback(1)):
        with pytest.raises(RoundRefusedError):
            refused()
    batch.spec_round_begin(slots=[1])
    with pytest.raises(RoundRefusedError):
        batch.spec_round_begin()
    schedule.step({0, 1}, 4, None)
    for keep in (5, -1, True, [1, 1], [1.0]):
        with pytest.raises(InvalidCountError):
            batch.spec_round_rollback(keep)
    with pytest.raises(RoundRefusedError, match="overwritten"):
        batch.spec_round_rollback(0)
    assert [batch.end(0), batch.end(1)] == [24, 24]
    batch.spec_round_rollback([1])
    assert [batch.end(0), batch.end(1)] == [24, 21]
    batch.spec_round_begin()
    batch.leave(0)
    batch.spec_round_commit()
    with pytest.raises(InvalidCountError):
        batch.spec_round_fits(-1)


def test_a_ring_costs_its_window_and_slack_only():
    """However long a row grows, its buffers have window + slack columns."""
    schedule = Schedule(KINDS["ring"](), 0)
    schedule.join()
    for count in (4, 20, 1, 100):
        schedule.step({0}, count, None)
        assert {array.shape[2] for array in schedule.batch.arrays} <= {10}
        assert schedule.batch.capacity(0) == 10


REFUSED = {
    "a window of none": (lambda: RotatingRowBatch(1, max_rows=1, window=0), InvalidGeometry),
    "sinks that fill the window": (lambda: RotatingRowBatch(1, max_rows=1, window=4, keep=4), InvalidGeometry),
    "a negative slack": (lambda: RotatingRowBatch(1, max_rows=1, window=4, slack=-1), InvalidGeometry),
    "seven bits": (lambda: QuantizedRowBatch(1, max_rows=1, bits=7), InvalidGeometry),
    "groups of ten": (lambda: RotatingQuantizedRowBatch(1, max_rows=1, window=4, group_size=10), InvalidGeometry),
    "no classes": (lambda: CapacityClasses(capacities=()), InvalidGeometry),
    "classes that fall": (lambda: CapacityClasses(capacities=(4, 2)), InvalidGeometry),
}


@pytest.mark.parametrize(("refused", "error"), REFUSED.values(), ids=REFUSED)
def test_geometry_is_checked(refused, error):
    """Sizes outside their range are typed errors before anything is made."""
    with pytest.raises(error):
        refused()


def contents_of(kind="plain", end=5):
    schedule = Schedule(KINDS[kind](), 3)
    schedule.join()
    schedule.step({0}, end, None)
    return schedule.batch, schedule.batch.contents(0)


REFUSED_JOINS = {
    "an end of none": (lambda batch, held: batch.join_contents(0, held), InvalidLength),
    "another end": (lambda batch, held: batch.join_contents(4, held), InvalidGeometry),
    "a layer less": (lambda batch, held: batch.join_contents(5, held[:1]), InvalidGeometry),
    "another dtype": (
        lambda batch, held: batch.join_contents(5, [tuple(f.astype(mx.float16) for f in each) for each in held]),
        InvalidGeometry,
    ),
    "a negative expectation": (lambda batch, _: batch.join(num_tokens=-1), InvalidLength),
    "contents of nothing": (lambda batch, _: batch.contents(batch.join()), EmptyCache),
}


@pytest.mark.parametrize(("refused", "error"), REFUSED_JOINS.values(), ids=REFUSED_JOINS)
def test_a_refused_join_changes_nothing(refused, error):
    """Contents that do not fit are typed errors; row and bytes stay."""
    batch, held = contents_of()
    with pytest.raises(error):
        refused(batch, held)
    assert batch.end(0) == 5
    assert all(
        mx.array_equal(one, two)
        for now, then in zip(batch.contents(0), held, strict=True)
        for one, two in zip(now, then, strict=True)
    )
    batch.check_integrity()


def test_a_full_batch_refuses_contents():
    """A row that finds no slot leaves no trace."""
    batch, held = contents_of()
    for _ in range(MAX_ROWS - 1):
        batch.join_contents(5, held)
    with pytest.raises(SlotsExhausted):
        batch.join_contents(5, held)
    batch.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_joins_and_leaves_leak_nothing(kind):
    """Active memory after the last leave is what it was before the first join."""
    batch, held = contents_of(kind)
    del batch
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    batch = KINDS[kind]()
    for turn in range(1000):
        slots = [batch.join_contents(5, held) for _ in range(1 + turn % MAX_ROWS)]
        for slot in slots:
            batch.leave(slot)
    assert batch.nbytes == 0
    assert mx.get_active_memory() == before
