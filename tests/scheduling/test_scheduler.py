"""Laws of `BatchScheduler`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_sampling import SamplingParams
from headrace_scheduling.scheduler import BatchScheduler
from headrace_scheduling.steps import RowId, RowSpec, StepResult

_GREEDY = SamplingParams()
_EOS = 9


def _spec(request_id, num_prompt=3, max_tokens=4, *, serial=False):
    return RowSpec(
        row_id=RowId(request_id),
        prompt_ids=tuple(range(100, 100 + num_prompt)),
        max_tokens=max_tokens,
        sampling=_GREEDY,
        eos_token_ids=frozenset({_EOS}),
        serial=serial,
    )


def _sampled(step):
    return [part.row_id.request_id for part in step.prefills if part.is_last] + [row.request_id for row in step.decodes]


def _apply(scheduler, step, token=1):
    gains = scheduler.apply(StepResult({RowId(request_id): (token,) for request_id in _sampled(step)}))
    for gain in gains:
        if gain.finish_reason is not None:
            scheduler.remove(gain.row_id)
    return gains


def test_prefill_is_sliced_and_interleaved_with_decode():
    """Law: a running row decodes in every step while a long prompt is prefilled slice by slice."""
    scheduler = BatchScheduler(2, 1000, prefill_chunk=4)
    scheduler.submit([_spec(1, 2, 20)])
    scheduler.schedule()
    scheduler.submit([_spec(2, 10, 20)])
    slices = []
    for _ in range(3):
        step = scheduler.schedule()
        assert [row.request_id for row in step.decodes] == [1]
        slices.append((*((len(part.token_ids), part.is_last) for part in step.prefills), len(step.openings)))
    assert slices == [((4, False), 1), ((4, False), 0), ((2, True), 0)]
    assert [row.request_id for row in scheduler.schedule().decodes] == [1, 2]


def test_admission_is_in_order_and_within_max_rows():
    """Law: requests get slots in order of arrival, never more than `max_rows`."""
    scheduler = BatchScheduler(2, 100)
    for request_id in (1, 2, 3):
        scheduler.submit([_spec(request_id)])
    assert [opening.row_id.request_id for opening in scheduler.schedule().openings] == [1, 2]
    assert scheduler.waiting_ids == (RowId(3),)
    assert scheduler.remove(RowId(1))
    assert [opening.row_id.request_id for opening in scheduler.schedule().openings] == [3]


def test_a_row_is_never_scheduled_beyond_its_limit():
    """Law: with tokens unread, a row is scheduled exactly `max_tokens` times."""
    scheduler = BatchScheduler(1, 100)
    scheduler.submit([_spec(1, 3, 3)])
    steps = [scheduler.schedule() for _ in range(3)]
    assert scheduler.schedule() is None
    assert [gain.finish_reason for step in steps for gain in _apply(scheduler, step)] == [None, None, "length"]


def test_tokens_after_the_end_are_dropped():
    """Law: EOS ends a row, counts and is not delivered; what was dispatched before it was read is dropped."""
    scheduler = BatchScheduler(1, 100)
    scheduler.submit([_spec(1)])
    first, second = scheduler.schedule(), scheduler.schedule()
    (gain,) = _apply(scheduler, first, _EOS)
    assert (gain.token_ids, gain.num_sampled, gain.finish_reason) == ((), 1, "stop")
    assert _apply(scheduler, second) == []


def test_several_tokens_of_one_step_are_cut_at_eos_and_at_the_limit():
    """Law: a list of tokens ends where the first of EOS and limit is."""
    scheduler = BatchScheduler(1, 100)
    scheduler.submit([_spec(1, 3, 4)])
    scheduler.schedule()
    (gain,) = scheduler.apply(StepResult({RowId(1): (5, 6, _EOS, 7)}))
    assert (gain.token_ids, gain.num_sampled, gain.finish_reason) == ((5, 6), 3, "stop")
    scheduler = BatchScheduler(1, 100)
    scheduler.submit([_spec(1, 3, 2)])
    scheduler.schedule()
    (gain,) = scheduler.apply(StepResult({RowId(1): (5, 6, 7)}))
    assert (gain.token_ids, gain.finish_reason) == ((5, 6), "length")


def test_a_serial_row_runs_alone():
    """Law: a serial row waits for all others and others wait for it, in order."""
    scheduler = BatchScheduler(4, 100)
    scheduler.submit([_spec(1, max_tokens=1)])
    scheduler.submit([_spec(2, max_tokens=1, serial=True)])
    scheduler.submit([_spec(3, max_tokens=1)])
    order = []
    while (step := scheduler.schedule()) is not None:
        order.append(_sampled(step))
        _apply(scheduler, step)
    assert order == [[1], [2], [3]]


def test_hold_stops_admission_only():
    """Law: while held nothing is admitted and running rows go on."""
    scheduler = BatchScheduler(2, 100)
    scheduler.submit([_spec(1)])
    scheduler.schedule()
    scheduler.submit([_spec(2)])
    scheduler.hold = True
    assert _sampled(scheduler.schedule()) == [1]
    scheduler.hold = False
    assert _sampled(scheduler.schedule()) == [2, 1]


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(0, 1), (1, 0), (99, 2)])
def test_what_cannot_fit_is_refused(num_prompt, max_tokens):
    """Law: a row that could outgrow the context is refused and changes nothing."""
    scheduler = BatchScheduler(1, 100)
    with pytest.raises(ValueError, match="does not fit"):
        scheduler.submit([_spec(1, num_prompt, max_tokens)])
    assert scheduler.schedule() is None


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_row_is_prefilled_whole_and_sampled_to_its_limit(data):
    """Law: under any arrivals and removals, slots add up, and each kept row sees its whole prompt and its limit."""
    scheduler = BatchScheduler(
        data.draw(st.integers(1, 4)),
        200,
        prefill_chunk=data.draw(st.integers(1, 9)),
    )
    specs, seen, counts, removed, in_flight = {}, {}, {}, set(), []
    for _ in range(data.draw(st.integers(5, 40))):
        action = data.draw(st.sampled_from(["submit", "remove", "step", "step"]))
        if action == "submit":
            spec = _spec(
                len(specs), data.draw(st.integers(1, 20)), data.draw(st.integers(1, 6)), serial=data.draw(st.booleans())
            )
            specs[spec.row_id] = spec
            scheduler.submit([spec])
        elif action == "remove" and specs:
            row_id = data.draw(st.sampled_from(sorted(specs)))
            if row_id in (*scheduler.running_ids, *scheduler.waiting_ids):
                scheduler.remove(row_id)
                removed.add(row_id)
        else:
            _step(scheduler, in_flight, seen, counts)
        scheduler.check_integrity()
    while _step(scheduler, in_flight, seen, counts):
        scheduler.check_integrity()
    assert scheduler.num_running == scheduler.num_waiting == 0
    for row_id, spec in specs.items():
        if row_id not in removed:
            assert tuple(seen[row_id]) == spec.prompt_ids
            assert counts[row_id] == spec.max_tokens


def _step(scheduler, in_flight, seen, counts):
    step = scheduler.schedule()
    if step is not None:
        in_flight.append(step)
        for part in step.prefills:
            seen.setdefault(part.row_id, []).extend(part.token_ids)
    is_busy = step is not None or bool(in_flight)
    if len(in_flight) == 2 or (step is None and in_flight):
        for gain in _apply(scheduler, in_flight.pop(0)):
            counts[gain.row_id] = counts.get(gain.row_id, 0) + gain.num_sampled
    return is_busy
