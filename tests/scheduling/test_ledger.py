"""Laws of `PortLedger`, which both transports share."""

import pytest

from headrace_scheduling import (
    Cancelled,
    EngineStatus,
    EngineUnavailable,
    Failed,
    GenerationRequest,
    Prepare,
    RowEvents,
    StepEvents,
    Submit,
)
from headrace_scheduling.ledger import PortLedger

_FAILED = Failed(code="engine_failed", message="it died")


def _submit(request_id):
    return Submit(request_id=request_id, request=GenerationRequest(prompt_ids=(1,)), max_tokens=1)


@pytest.fixture
def ledger():
    ledger = PortLedger()
    ledger.events = []
    ledger.open(ledger.events.append)
    ledger.deliver(StepEvents(status=EngineStatus(state="ready")))
    return ledger


def _ends(ledger):
    return [(row.request_id, row.end) for events in ledger.events for row in events.rows if row.end is not None]


def test_a_death_ends_exactly_what_is_outstanding(ledger):
    """Law: requests and operations that have not ended get their end, the others no second one."""
    for message in (_submit(1), _submit(2), Prepare(3, "operation")):
        ledger.pass_on(message, lambda message: None)
    status = EngineStatus(state="ready", num_submitted=2, num_cancelled=1)
    ledger.deliver(StepEvents(status=status, rows=(RowEvents(request_id=1, end=Cancelled()),)))
    ledger.end_all(_FAILED, EngineStatus(state="restarting", detail="killed"))
    assert _ends(ledger) == [(1, Cancelled()), (2, _FAILED)]
    assert ledger.events[-1].operations[0].error == "killed"
    assert not ledger.has_outstanding
    with pytest.raises(EngineUnavailable, match="restarting: killed"):
        ledger.pass_on(_submit(4), lambda message: None)


def test_totals_grow_across_restarts(ledger):
    """Law: a new engine counts from nothing, the port's totals go on and still add up."""
    ledger.pass_on(_submit(1), lambda message: None)
    ledger.end_all(_FAILED, EngineStatus(state="restarting", num_restarts=1))
    assert (ledger.status.num_submitted, ledger.status.num_failed) == (1, 1)
    ledger.deliver(StepEvents(status=EngineStatus(state="ready", num_submitted=2, num_finished=2)))
    assert (ledger.status.num_submitted, ledger.status.num_failed, ledger.status.num_finished) == (3, 1, 2)
    assert ledger.status.num_restarts == 1


def test_nothing_follows_a_final_state(ledger):
    """Law: an engine that was given up cannot come back, nor end a request twice."""
    ledger.pass_on(_submit(1), lambda message: None)
    ledger.end_all(Cancelled(), EngineStatus(state="stopped"))
    ledger.deliver(StepEvents(status=EngineStatus(state="ready"), rows=(RowEvents(request_id=1, end=_FAILED),)))
    ledger.end_all(_FAILED, EngineStatus(state="failed"))
    assert _ends(ledger) == [(1, Cancelled())]
    assert ledger.status.state == "stopped"
