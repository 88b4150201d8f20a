"""Laws of `EngineLoop` on a fake step runner, on this thread: messages first, then run to the end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_sampling import SamplingParams
from headrace_scheduling import (
    Cancel,
    Cancelled,
    Drain,
    Exclusive,
    Failed,
    Finished,
    GenerateOptions,
    GenerationRequest,
    Prefetch,
    Prepare,
    Stop,
    Submit,
)
from headrace_scheduling.testing import EngineRun, FakeLoader, FakeStepRunner, make_submit

_TOTALS = ("num_steps", "num_prompt_tokens", "num_generated_tokens", "num_submitted", "num_finished", "num_failed")


def test_rows_are_generated_together_and_end_once():
    """Law: each row gets its own text, its statistics and exactly one end, in its last event."""
    run = EngineRun().run(make_submit(1, "abc", 5), make_submit(2, "xy", 3))
    assert (run.text(1), run.text(2)) == ("abcab", "xyx")
    end = run.end(1)
    assert end.reason == "length"
    assert (end.stats.num_prompt_tokens, end.stats.num_generated_tokens, end.stats.num_cached_tokens) == (3, 5, 0)
    assert end.stats.queue_s > 0
    assert end.stats.decode_tps > 0
    assert run.rows(1)[-1].end is end
    assert run.rows(1)[0].admitted
    assert run.events[0].info is not None
    assert run.events[-1].status.state == "stopped"


def test_the_next_step_is_dispatched_before_tokens_are_read():
    """Law: in a steady decode two steps are in flight when the older one is read."""
    depths = []

    class Watched(FakeStepRunner):
        def collect(self):
            depths.append(self.num_in_flight)
            return super().collect()

    run = EngineRun()
    run.loop._runner = Watched()
    run.run(make_submit(1, max_tokens=6))
    assert depths == [2, 2, 2, 2, 2, 1]


def test_a_lone_last_slice_is_read_at_once():
    """Law: when nothing can follow, tokens are read without waiting for a second step."""
    run = EngineRun().run(make_submit(1, max_tokens=1))
    assert len(run.steps) == 1
    assert run.text(1) == "a"


def test_one_event_per_step_of_decode():
    """Law: all rows of a decode step leave in one message."""
    run = EngineRun().run(make_submit(1, max_tokens=20), make_submit(2, max_tokens=20))
    decode_events = [events for events in run.events if any(row.delta for row in events.rows)]
    assert len(run.steps) == 20
    assert len(decode_events) == 20
    # Beside the steps: ready, admission, the first dispatch with nothing to read yet, stopped.
    assert len(run.events) <= len(run.steps) + 4


def test_stop_strings_end_a_row_and_are_reported():
    """Law: a stop string that spans tokens ends the row with reason stop; it and what follows is not delivered."""
    run = EngineRun().run(make_submit(1, "hello", 20, stop=("oh", "lohe")))
    assert run.text(1) == "hel"
    assert (run.end(1).reason, run.end(1).stop_string) == ("stop", "lohe")


def test_held_text_is_flushed_at_the_limit():
    """Law: text held back as a possible stop string is delivered when the row ends."""
    run = EngineRun().run(make_submit(1, "abc", 3, stop=("cx",)))
    assert (run.text(1), run.end(1).reason) == ("abc", "length")


def _eos_after_two(history, num_prompt_tokens):
    return 256 if len(history) - num_prompt_tokens == 2 else 65


def test_eos_ends_a_row_and_counts_but_is_not_text():
    """Law: EOS gives reason stop, is counted and not delivered; with ignore_eos the row goes on."""
    run = EngineRun(next_token=_eos_after_two).run(
        make_submit(1, max_tokens=6), make_submit(2, max_tokens=6, ignore_eos=True)
    )
    assert run.text(1) == "AA"
    assert (run.end(1).reason, run.end(1).stats.num_generated_tokens) == ("stop", 3)
    assert run.text(2) == "AAAAA"
    assert (run.end(2).reason, run.end(2).stats.num_generated_tokens) == ("length", 6)


@pytest.mark.parametrize("at_step", [1, 2, 4])
def test_cancellation_is_seen_at_the_next_step_wherever_the_row_is(at_step):
    """Law: queued (2), in prefill (1) or in decode, a cancelled row ends once and its slot is free."""
    script = {at_step: [Cancel(1), Cancel(2), Cancel(77)]}
    run = EngineRun(script=script, max_rows=1, prefill_chunk=1).run(
        make_submit(1, "abc", 50), make_submit(2), make_submit(3)
    )
    assert run.end(1) == run.end(2) == Cancelled()
    assert isinstance(run.end(3), Finished)
    assert len([step for step in run.steps if any(row_id.request_id == 1 for row_id in step.decodes)]) <= 2
    assert run.runner.num_slots == 0


def test_a_failing_decoder_ends_its_row_only():
    """Law: when a row's text cannot be made it fails alone."""
    loader = FakeLoader(failing_decoders=frozenset({0}))
    run = EngineRun(loader=loader).run(make_submit(1), make_submit(2))
    assert run.end(1).code == "request_failed"
    assert isinstance(run.end(2), Finished)
    assert run.text(2) == "abcab"


def test_a_failing_codec_ends_its_row_only():
    """Law: a decoder that cannot be made fails its row at admission and frees its slot."""
    run = EngineRun()
    made = []

    def new_decoder():
        made.append(0)
        if len(made) == 1:
            raise LookupError("no decoder")
        return original()

    codec = run.loop._book._codec
    original, codec.new_decoder = codec.new_decoder, new_decoder
    run.run(make_submit(1), make_submit(2))
    assert run.end(1).code == "request_failed"
    assert run.text(2) == "abcab"
    assert run.runner.num_slots == 0


@pytest.mark.parametrize("where", ["failing_dispatches", "failing_collects"])
def test_a_failing_step_ends_the_rows_that_ran(where):
    """Law: running rows fail with engine_failed, waiting ones stay, the runner is reset, the next request works."""
    run = EngineRun(max_rows=1, **{where: frozenset({1})}).run(make_submit(1), make_submit(2), make_submit(3))
    assert run.end(1).code == "engine_failed"
    assert "ArithmeticError" in run.end(1).message
    assert run.text(2) == run.text(3) == "abcab"
    assert run.runner.num_resets == 1
    status = run.events[-1].status
    assert (status.num_failed, status.num_finished, status.num_running, status.num_waiting) == (1, 2, 0, 0)


def test_an_engine_whose_steps_always_fail_stays_alive_and_truthful():
    """Law: every request fails once, nothing loops, and the counts say so."""
    run = EngineRun(max_rows=1, failing_dispatches=frozenset(range(99))).run(*(make_submit(n) for n in range(5)))
    assert [run.end(n).code for n in range(5)] == ["engine_failed"] * 5
    assert run.events[-1].status.num_failed == 5
    assert run.events[-1].status.state == "stopped"


class Count:
    pass


def test_an_exclusive_operation_runs_while_no_row_does():
    """Law: admission stops, running rows finish, the operation runs, admission resumes."""
    seen = []
    run = EngineRun(max_rows=2, handlers={Count: lambda loaded, op: seen.append(run.runner.num_slots)})
    run.script[2] = [Exclusive(7, Count()), make_submit(2)]
    run.run(make_submit(1, max_tokens=8))
    assert seen == [0]
    assert run.results()[7].error is None
    first_of_2 = next(
        n for n, step in enumerate(run.steps) if any(part.row_id.request_id == 2 for part in step.prefills)
    )
    assert not any(row.request_id == 1 for step in run.steps[first_of_2:] for row in step.decodes)
    assert run.text(2) == "abcab"


def test_a_preparation_runs_between_steps():
    """Law: a preparation does not wait for rows to finish."""
    seen = []
    run = EngineRun(handlers={Count: lambda loaded, op: seen.append(run.runner.num_slots) or "value"})
    run.script[3] = [Prepare(7, Count())]
    run.run(make_submit(1, max_tokens=9))
    assert seen == [1]
    assert run.results()[7].value == "value"
    assert len(run.steps) == 9


def test_operations_that_fail_report_it_and_hurt_nobody():
    """Law: an unknown or raising operation becomes its own error."""

    def fail(loaded, operation):
        raise LookupError("nothing there")

    run = EngineRun(handlers={Count: fail}).run(
        Prepare(1, Count()), Exclusive(2, object()), Prefetch((1,)), make_submit(3)
    )
    assert run.results()[1].error == "LookupError: nothing there"
    assert "no handler" in run.results()[2].error
    assert run.text(3) == "abcab"


def test_drain_finishes_what_waits_and_refuses_what_comes():
    """Law: after Drain everything accepted finishes, later requests fail, then the loop ends."""
    run = EngineRun(max_rows=1).run(make_submit(1), make_submit(2), Drain(), make_submit(3), Exclusive(4, Count()))
    assert run.text(1) == run.text(2) == "abcab"
    assert run.end(3).code == "engine_failed"
    assert run.results()[4].error is not None
    assert {events.status.state for events in run.events} >= {"ready", "draining", "stopped"}


def test_stop_cancels_everything():
    """Law: Stop ends running and waiting rows as cancelled and operations with an error."""
    run = EngineRun(max_rows=1, script={2: [Exclusive(3, Count()), Stop()]}).run(
        make_submit(1, max_tokens=50), make_submit(2)
    )
    assert run.end(1) == run.end(2) == Cancelled()
    assert run.results()[3].error is not None


def test_a_request_that_outgrows_the_context_is_refused_alone():
    """Law: the engine checks limits again, because placements come from outside."""
    run = EngineRun(loader=FakeLoader(max_positions=10)).run(make_submit(1, "abc", 50), make_submit(2))
    assert run.end(1).code == "context_over_budget"
    assert run.text(2) == "abcab"


_BIASED = GenerateOptions(sampling=SamplingParams(logit_bias={70_000: 1.0}))


@pytest.mark.parametrize(
    "request_", [GenerationRequest(prompt_ids=(97, 70_000)), GenerationRequest(prompt_ids=(97,), options=_BIASED)]
)
def test_a_token_outside_the_vocabulary_is_refused_alone(request_):
    """Law: what would fail inside a step is refused before it, and its neighbours do not notice."""
    run = EngineRun().run(Submit(request_id=1, request=request_, max_tokens=5), make_submit(2))
    assert run.end(1).code == "request_failed"
    assert run.text(2) == "abcab"


def test_admission_is_told_before_a_long_prefill():
    """Law: the status that counts a row as running is published before its first slice is dispatched."""
    run = EngineRun()
    told = []
    run.runner._on_step = lambda step: told.append(run.events[-1])
    run.run(make_submit(1, max_tokens=2))
    assert told[0].status.num_running == 1
    assert told[0].rows[0].admitted


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_every_request_ends_exactly_once(data):
    """Law: under any arrivals, cancels and failures each request ends once and every slot comes back."""
    num_requests = data.draw(st.integers(1, 10))
    script = {}
    for request_id in range(num_requests):
        prompt = data.draw(st.text("abcdé", min_size=1, max_size=12))
        stop = tuple(data.draw(st.lists(st.text("abcd", min_size=1, max_size=3), max_size=2)))
        serial = data.draw(st.booleans())
        step = data.draw(st.integers(0, 6))
        submit = make_submit(request_id, prompt, data.draw(st.integers(1, 12)), stop=stop, serial=serial)
        script.setdefault(step, []).append(submit)
        if data.draw(st.booleans()):
            script.setdefault(step + data.draw(st.integers(0, 6)), []).append(Cancel(request_id))
    faults = st.frozensets(st.integers(0, 15), max_size=2)
    run = EngineRun(
        script=script,
        max_rows=data.draw(st.integers(1, 3)),
        prefill_chunk=data.draw(st.integers(1, 6)),
        failing_dispatches=data.draw(faults),
        failing_collects=data.draw(faults),
    )
    run.run(*script.pop(0, []), *([Drain()] if data.draw(st.booleans()) else []))
    submitted = {row.request_id for events in run.events for row in events.rows}
    for request_id in submitted:
        assert len(run.ends(request_id)) == 1
        assert run.rows(request_id)[-1].end is not None
    assert run.runner.num_slots == 0
    run.loop._scheduler.check_integrity()
    assert run.loop._scheduler.num_running == run.loop._scheduler.num_waiting == 0
    for earlier, later in zip(run.events, run.events[1:], strict=False):
        assert all(getattr(earlier.status, name) <= getattr(later.status, name) for name in _TOTALS)
    last = run.events[-1].status
    assert last.num_submitted == last.num_finished + last.num_failed + last.num_cancelled == len(submitted)


def test_failed_ends_hold_no_exception():
    """Law: what a failure leaves behind is plain data."""
    run = EngineRun(failing_dispatches=frozenset({0})).run(make_submit(1))
    assert isinstance(run.end(1), Failed)
    assert type(run.end(1).message) is str
