"""Layers of slots that tell the same replay of alike inputs are replayed by one call, their rows behind each other."""

import mlx.core as mx
import pytest

from headrace_kvcache import IntegrityError, InvalidGeometry, RecurrentCache, make_row_batch

WIDTH = 4


class Layers:
    """Slots of toy layers that sum up their inputs and tell `replay`, which notes its calls."""

    def __init__(self, num_layers, *, max_rows=2, num_rows=2, widths=None, dtypes=None):
        self.batch = make_row_batch([RecurrentCache(1) for _ in range(num_layers)], max_rows=max_rows)
        self.slots = [self.batch.join() for _ in range(num_rows)]
        self.widths = widths or [WIDTH] * num_layers
        self.dtypes = dtypes or [mx.float32] * num_layers
        self.calls = []
        self.sums = [[0] * num_layers for _ in range(num_rows)]

    def replay(self, arrays, kept, inputs):
        self.calls.append((None if arrays[0] is None else arrays[0].shape[0], inputs.shape, kept.counts))
        return [summed(arrays[0], mx.where(kept.mask(inputs.shape[1], ndim=3), inputs, 0))]

    def inputs(self, layer, num_tokens):
        shape = (len(self.slots), num_tokens, self.widths[layer])
        return mx.full(shape, layer + 1).astype(self.dtypes[layer])

    def step(self, num_tokens):
        for layer, view in enumerate(self.batch.view(self.slots, num_tokens)):
            inputs = self.inputs(layer, num_tokens)
            view.record(self.replay, inputs)
            view[0] = summed(view[0], inputs)
        self.batch.advance(self.slots, num_tokens)

    def round(self, keeps, num_tokens=3):
        self.batch.spec_round_begin(slots=self.slots)
        self.step(num_tokens)
        self.batch.spec_round_rollback(keeps)

    def check(self, ends):
        self.batch.check_integrity()
        for slot, end in zip(self.slots, ends, strict=True):
            assert self.batch.end(slot) == end
            for layer, cache in enumerate(self.batch.extract(slot)):
                assert cache[0].dtype == self.dtypes[layer]
                assert cache[0].tolist() == [[end * (layer + 1)] * self.widths[layer]]


def summed(state, inputs):
    added = inputs.sum(axis=1)
    return added if state is None else state + added


def test_layers_that_tell_the_same_replay_are_replayed_by_one_call():
    """Three layers of two rows are six rows of one call, in the order of the layers."""
    layers = Layers(3)
    layers.step(2)
    layers.round([1, 2])
    assert layers.calls == [(6, (6, 3, WIDTH), (1, 2) * 3)]
    layers.check([3, 4])


def test_what_lies_behind_each_other_is_not_joined_again():
    """From round to round the slots stay parts of one array, which the next replay gets as it is."""
    layers = Layers(3)
    layers.step(2)
    seen = []

    def replay(arrays, kept, inputs):
        seen.append(arrays[0])
        found = Layers.replay(layers, arrays, kept, inputs)
        seen.append(found[0])
        return found

    layers.replay = replay
    for _ in range(3):
        layers.round([1, 2])
    before_first, after_first, before_second, after_second, before_third, _ = seen
    assert before_second is after_first
    assert before_third is after_second
    assert before_first is not after_first
    layers.check([5, 8])


@pytest.mark.parametrize("interruption", ["step", "commit", "leave", "join", "smaller round"])
def test_slots_that_changed_are_joined_anew(interruption):
    """Steps, whole rounds and rows that come and go between two rounds all reach the next one."""
    layers = Layers(3, max_rows=4, num_rows=4)
    layers.step(2)
    layers.round([1, 2, 3, 1])
    ends = [3, 4, 5, 3]
    if interruption == "step":
        layers.step(1)
        ends = [end + 1 for end in ends]
    elif interruption == "commit":
        layers.round(3)
        ends = [end + 3 for end in ends]
    elif interruption == "leave":
        layers.batch.leave(layers.slots.pop())
        ends.pop()
    elif interruption == "join":
        layers.batch.leave(layers.slots[0])
        assert layers.batch.join() == layers.slots[0]
        ends[0] = 0
    else:
        layers.slots, ends = layers.slots[:2], ends[:2]
    layers.round([2, 0, 1, 2][: len(ends)])
    layers.check([end + kept for end, kept in zip(ends, [2, 0, 1, 2], strict=False)])
    layers.step(1)
    layers.round([1, 1, 2, 0][: len(ends)])
    layers.check([end + kept + 1 for end, kept in zip(ends, [3, 1, 3, 2], strict=False)])


@pytest.mark.parametrize(
    "unlike",
    [
        {"widths": [WIDTH, 2 * WIDTH, WIDTH]},
        {"dtypes": [mx.float32, mx.bfloat16, mx.float32]},
    ],
    ids=["width", "dtype"],
)
def test_layers_of_other_inputs_are_replayed_apart(unlike):
    """Joining would promote a dtype or fail on a width: the odd one is a call of its own, the others stay together."""
    layers = Layers(3, **unlike)
    layers.step(2)
    for _ in range(2):
        layers.round([1, 2])
    assert [call[0] for call in layers.calls] == [4, 2] * 2
    layers.check([4, 6])


def test_layers_of_other_states_are_replayed_apart():
    """Alike inputs, but states of another dtype: nothing is promoted."""
    layers = Layers(2)
    for layer, view in enumerate(layers.batch.view(layers.slots, 1)):
        view[0] = mx.ones((2, WIDTH), mx.float32 if layer else mx.float16) * (layer + 1)
        view.record(layers.replay, layers.inputs(layer, 1))
    layers.batch.advance(layers.slots, 1)
    layers.batch.spec_round_begin(slots=layers.slots)
    for layer, view in enumerate(layers.batch.view(layers.slots, 2)):
        view.record(layers.replay, mx.full((2, 2, WIDTH), layer + 1, mx.float16))
        view[0] = view[0]
    layers.batch.advance(layers.slots, 2)
    layers.batch.spec_round_rollback(1)
    assert [call[0] for call in layers.calls] == [2, 2]
    found = layers.batch.extract(layers.slots[0])
    assert [cache[0].dtype for cache in found] == [mx.float16, mx.float32]
    assert [cache[0].tolist() for cache in found] == [[[2.0] * WIDTH], [[4.0] * WIDTH]]


def test_the_steps_of_a_round_may_tell_different_replays():
    """Together in one step, apart in the next, in another order in the third: each goes on from what the last left."""
    layers = Layers(3)
    layers.step(2)
    layers.batch.spec_round_begin(slots=layers.slots)

    def own(inputs):
        return lambda arrays, kept: Layers.replay(layers, arrays, kept, inputs)

    for kinds in ("sss", "oso", "oss"):
        for layer, view in enumerate(layers.batch.view(layers.slots, 2)):
            inputs = layers.inputs(layer, 2)
            view.record(*((layers.replay, inputs) if kinds[layer] == "s" else (own(inputs),)))
            view[0] = summed(view[0], inputs)
        layers.batch.advance(layers.slots, 2)
    layers.batch.spec_round_rollback([5, 6])
    assert [call[0] for call in layers.calls] == [6, 2, 2, 2, 2, 4]
    layers.check([7, 8])


def test_a_replay_of_what_is_not_by_row_is_refused():
    """Inputs and results have one entry per row, and there is a result for each array."""
    for inputs, returned, words in (
        (mx.ones((3, 2)), lambda arrays: arrays, "takes inputs"),
        (mx.ones((2, 2)), lambda arrays: [mx.ones((1, WIDTH))], "returns arrays"),
        (mx.ones((2, 2)), lambda arrays: [], "returns 0 arrays"),
    ):
        layers = Layers(2)
        layers.step(1)
        layers.batch.spec_round_begin(slots=layers.slots)

        def replay(arrays, kept, inputs, returned=returned):
            return returned(arrays)

        for view in layers.batch.view(layers.slots, 2):
            view.record(replay, inputs)
            view[0] = view[0] + 1
        layers.batch.advance(layers.slots, 2)
        with pytest.raises(InvalidGeometry, match=words):
            layers.batch.spec_round_rollback(1)


def test_what_lies_behind_each_other_is_checked():
    """Books of seats that the joined arrays do not have are found."""
    layers = Layers(3)
    layers.step(2)
    layers.round([1, 2])
    layers.batch.check_integrity()
    layers.batch._batches[0]._buffers._joined_seats += 1
    with pytest.raises(IntegrityError, match="cannot be the parts"):
        layers.batch.check_integrity()


def test_rounds_leave_no_more_memory_than_the_slots():
    """What lies behind each other is the slots' own bytes, and the last row to leave gives them back."""
    layers = Layers(8, widths=[4096] * 8)
    layers.step(2)
    mx.eval(layers.batch.arrays)
    held = mx.get_active_memory()
    for turn in range(6):
        layers.round([1 + turn % 2, 2])
        mx.eval(layers.batch.arrays)
        assert mx.get_active_memory() - held <= 4096
    for slot in layers.slots:
        layers.batch.leave(slot)
    assert mx.get_active_memory() < held
