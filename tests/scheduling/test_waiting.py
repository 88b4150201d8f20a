"""Laws of the waiting queue and of the deal of prefill tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_sampling import SamplingParams
from headrace_scheduling.packs import Part, pack_decodes, pack_slices
from headrace_scheduling.prefill import deal_tokens
from headrace_scheduling.sharing import common_prefix_length, shared_length
from headrace_scheduling.steps import KnownRun, PrefillSlice, RowId, RowSpec, Step
from headrace_scheduling.waiting import WaitingQueue


def _spec(number, *, is_batch=False):
    return RowSpec(row_id=RowId(number), prompt_ids=(1,), max_tokens=1, sampling=SamplingParams(), is_batch=is_batch)


def _order(queue, now):
    return [row.spec.row_id.request_id for row in queue.in_order(now)]


def test_interactive_rows_come_first_and_each_priority_in_order_of_arrival():
    """Law: batch rows wait behind all others, and nobody overtakes within a priority."""
    queue = WaitingQueue(ageing_s=10.0)
    for number, is_batch in enumerate([True, False, True, False]):
        queue.add(_spec(number, is_batch=is_batch), now=0.0)
    assert _order(queue, 1.0) == [1, 3, 0, 2]
    assert queue.pop(RowId(3)).spec.row_id == RowId(3)
    assert queue.pop(RowId(3)) is None
    assert _order(queue, 1.0) == [1, 0, 2]


def test_a_batch_row_that_has_waited_counts_as_interactive():
    """Law: after `ageing_s` a batch row has the place of its arrival, so no stream of others starves it."""
    queue = WaitingQueue(ageing_s=10.0)
    queue.add(_spec(0, is_batch=True), now=0.0)
    queue.add(_spec(1, is_batch=True), now=5.0)
    queue.add(_spec(2), now=6.0)
    assert _order(queue, 9.9) == [2, 0, 1]
    assert _order(queue, 10.0) == [0, 2, 1]
    assert _order(queue, 15.0) == [0, 1, 2]


@given(remaining=st.lists(st.integers(1, 5000), max_size=12), budget=st.integers(1, 2048))
def test_a_deal_stays_within_its_budget_and_always_advances(remaining, budget):
    """Law: at most the budget is dealt, nobody gets more than it needs, and the oldest row always gets its half."""
    dealt = deal_tokens(remaining, budget)
    assert len(dealt) == len(remaining)
    assert sum(dealt) <= budget
    assert all(0 <= share <= need for share, need in zip(dealt, remaining, strict=True))
    if remaining:
        assert dealt[0] >= min(remaining[0], -(-budget // 2))
        # What is left over could not have been used well: only a sliver is.
        assert sum(dealt) == min(budget, sum(remaining)) or budget - sum(dealt) < 16 or dealt[0] == remaining[0]


@pytest.mark.parametrize(
    ("remaining", "budget", "expected"),
    [
        ([], 512, []),
        ([4000], 512, [512]),
        ([4000, 64], 512, [448, 64]),
        ([4000, 300, 64], 512, [256, 192, 64]),
        ([10, 300, 64], 512, [10, 300, 64]),
        ([4000, 250, 250], 512, [262, 250, 0]),
    ],
)
def test_a_deal_serves_the_oldest_and_then_the_shortest(remaining, budget, expected):
    """Law: a short prompt does not wait for a long one, and the long one keeps half of every step."""
    assert deal_tokens(remaining, budget) == expected


@given(data=st.data())
def test_common_prefixes_are_what_a_loop_would_find(data):
    """Law: halving blocks finds the first difference."""
    first = data.draw(st.lists(st.integers(0, 2), max_size=60))
    cut = data.draw(st.integers(0, len(first)))
    second = first[:cut] + data.draw(st.lists(st.integers(0, 2), max_size=20))
    expected = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    expected = min(len(first), len(second)) if expected is None else expected
    assert common_prefix_length(first, second) == expected
    if first:
        assert shared_length(first, second) == min(expected, len(first) - 1)


@given(lengths=st.lists(st.integers(1, 600), max_size=12))
def test_packs_hold_every_slice_once_and_waste_little(lengths):
    """Law: each slice runs once, and a forward is either cheap or at most a fifth padding."""
    slices = [Part(RowId(n), (0,) * k) for n, k in enumerate(lengths)]
    packs = pack_slices(slices)
    assert sorted(part.row_id for pack in packs for part in pack) == [part.row_id for part in slices]
    for pack in packs:
        sizes = [part.length for part in pack]
        padded = max(sizes) * len(sizes)
        assert len(pack) == 1 or padded <= max(128, 1.25 * sum(sizes))


@given(
    num_decodes=st.integers(0, 8), runs=st.lists(st.integers(2, 40), max_size=5), prompts=st.lists(st.integers(1, 9))
)
def test_runs_go_beside_decoding_rows_if_that_is_cheap(num_decodes, runs, prompts):
    """Law: each row of a step is fed once, and rows that decode are padded to 32 positions together at most."""
    decodes = tuple(RowId(n) for n in range(num_decodes))
    known = tuple(KnownRun(row_id=RowId(10 + n), token_ids=(1,) * size) for n, size in enumerate(runs))
    slices = tuple(
        PrefillSlice(row_id=RowId(20 + n), token_ids=(2,) * size, is_last=n % 2 == 0) for n, size in enumerate(prompts)
    )
    beside, rest = pack_decodes(Step(slices, decodes, runs=known))
    fed = {part.row_id: part for part in beside + rest}
    assert len(fed) == len(beside + rest) == num_decodes + len(runs) + len(prompts)
    assert all(fed[row_id].samples and not fed[row_id].token_ids for row_id in decodes)
    assert all(fed[run.row_id].samples and not fed[run.row_id].is_prompt for run in known)
    assert all(fed[part.row_id].samples == part.is_last and fed[part.row_id].is_prompt for part in slices)
    assert {part.row_id for part in beside} >= set(decodes)
    if len(beside) > num_decodes:
        assert max(part.length for part in beside) * len(beside) <= 32
