"""Laws of `EnginePort`, over both transports."""

import os
import pickle
import signal
import socket
import threading
import time
from functools import partial

import pytest

from headrace_scheduling import (
    Cancel,
    Cancelled,
    Drain,
    EngineUnavailable,
    Exclusive,
    Finished,
    GenerateOptions,
    GenerationRequest,
    Prepare,
    ProcessEnginePort,
    RestartPolicy,
    Submit,
    ThreadEnginePort,
)
from headrace_scheduling.operations import EncodeTexts, encode_texts
from headrace_scheduling.spawning import spawn
from headrace_scheduling.testing import FakeLoader, FakeRunnerFactory, fake_config, unpicklable_value

_ENDLESS = 4000
_WAIT_S = 60


def _wait_until(holds):
    deadline = time.monotonic() + _WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Recorder:
    """Collects what a port publishes and waits for it."""

    def __init__(self, port):
        self.port = port
        self.events = []
        self._changed = threading.Condition()

    def __call__(self, events):
        with self._changed:
            self.events.append(events)
            self._changed.notify_all()

    def wait(self, predicate):
        with self._changed:
            assert self._changed.wait_for(predicate, _WAIT_S), self.port.status
        return self

    def state(self, name):
        return self.wait(lambda: any(events.status.state == name for events in self.events))

    def rows(self, request_id):
        return [row for events in list(self.events) for row in events.rows if row.request_id == request_id]

    def end(self, request_id):
        self.wait(lambda: any(row.end is not None for row in self.rows(request_id)))
        (end,) = [row.end for row in self.rows(request_id) if row.end is not None]
        return end

    def started(self, request_id):
        return self.wait(lambda: any(row.delta is not None for row in self.rows(request_id)))

    def text(self, request_id):
        return "".join(row.delta.text for row in self.rows(request_id) if row.delta is not None)

    def result(self, operation_id):
        def find():
            return [each for events in self.events for each in events.operations if each.operation_id == operation_id]

        self.wait(lambda: bool(find()))
        (result,) = find()
        return result


def _submit(request_id, prompt="abc", max_tokens=5, **options):
    request = GenerationRequest(prompt_ids=tuple(prompt.encode()), options=GenerateOptions(**options))
    return Submit(request_id=request_id, request=request, max_tokens=max_tokens)


@pytest.fixture(params=["thread", "process"])
def open_port(request):
    """Start a port of either transport; it is closed after the test."""
    ports = []

    def make(config=None, **keywords):
        kind = ThreadEnginePort if request.param == "thread" else ProcessEnginePort
        port = kind(fake_config() if config is None else config, **keywords)
        ports.append(port)
        recorder = Recorder(port)
        port.start(recorder)
        return port, recorder

    make.transport = request.param
    yield make
    for port in ports:
        port.close()


def test_a_request_runs_to_its_end(open_port):
    """Law: both transports generate, report facts, statistics and status alike; nothing is sent before ready."""
    port, recorder = open_port()
    assert port.status.state in ("loading", "ready")
    recorder.state("ready")
    assert port.info.max_context == 4096
    assert (port.info.pid == os.getpid()) == (open_port.transport == "thread")
    port.send(_submit(1))
    port.send(_submit(2, "héllo", 6))
    assert isinstance(recorder.end(1), Finished)
    assert isinstance(recorder.end(2), Finished)
    assert (recorder.text(1), recorder.text(2)) == ("abcab", "héllo")
    status = port.status
    assert (status.num_submitted, status.num_finished, status.num_prompt_tokens) == (2, 2, 9)


def test_cancel_ends_a_running_row(open_port):
    """Law: Cancel ends the row once; a second one and one for an unknown id change nothing."""
    port, recorder = open_port()
    recorder.state("ready")
    port.send(_submit(1, max_tokens=_ENDLESS))
    recorder.started(1)
    port.send(Cancel(1))
    port.send(Cancel(1))
    port.send(Cancel(99))
    assert recorder.end(1) == Cancelled()
    port.send(_submit(2))
    assert isinstance(recorder.end(2), Finished)


def test_operations_return_values_and_errors(open_port):
    """Law: operations run by type in the engine, and their outcome comes back."""
    handlers = {EncodeTexts: encode_texts, int: unpicklable_value}
    port, recorder = open_port(fake_config(handlers=handlers))
    recorder.state("ready")
    port.send(Prepare(1, EncodeTexts(("ab", "c"))))
    assert recorder.result(1).value == ((97, 98), (99,))
    port.send(Exclusive(2, "no handler"))
    assert "no handler" in recorder.result(2).error
    if open_port.transport == "process":
        port.send(Prepare(3, 5))
        assert "cannot leave the engine's process" in recorder.result(3).error
        port.send(_submit(4))
        assert isinstance(recorder.end(4), Finished)


def test_a_model_that_cannot_be_loaded_is_reported_and_not_tried_again(open_port):
    """Law: a loader's error becomes the state's detail, work is refused with it, and nothing restarts."""
    port, recorder = open_port(fake_config(loader=FakeLoader(error="no such model: tiny")))
    recorder.state("failed")
    assert "no such model: tiny" in port.status.detail
    with pytest.raises(EngineUnavailable, match="no such model"):
        port.send(_submit(1))
    assert port.info is None
    assert port.status.num_restarts == 0


def test_a_failing_step_fails_its_rows_and_the_next_request_works(open_port):
    """Law: an exception in a forward step costs the rows that ran, no more."""
    port, recorder = open_port(fake_config(runner=FakeRunnerFactory(failing_dispatches=frozenset({2}))))
    recorder.state("ready")
    port.send(_submit(1, max_tokens=9))
    assert recorder.end(1).code == "engine_failed"
    port.send(_submit(2))
    assert isinstance(recorder.end(2), Finished)
    assert port.status.state == "ready"


def test_close_ends_what_runs_and_is_idempotent(open_port):
    """Law: after close every request has its end, the state is stopped and work is refused."""
    port, recorder = open_port()
    recorder.state("ready")
    port.send(_submit(1, max_tokens=_ENDLESS))
    recorder.started(1)
    port.close()
    port.close()
    assert recorder.end(1) == Cancelled()
    assert port.status.state == "stopped"
    with pytest.raises(EngineUnavailable, match="stopped"):
        port.send(_submit(2))
    port.send(Cancel(1))


def test_drain_finishes_and_stops(open_port):
    """Law: after Drain new work is refused at once, what runs finishes, the engine stops and stays down."""
    port, recorder = open_port()
    recorder.state("ready")
    port.send(_submit(1, max_tokens=200))
    port.send(Drain())
    with pytest.raises(EngineUnavailable, match="draining"):
        port.send(_submit(2))
    assert isinstance(recorder.end(1), Finished)
    recorder.state("stopped")
    assert port.status.num_restarts == 0


def test_work_is_refused_before_the_engine_is_ready():
    """Law: a port that is not started, or still loads, takes no work."""
    for kind in (ThreadEnginePort, ProcessEnginePort):
        port = kind(fake_config())
        with pytest.raises(EngineUnavailable, match="loading"):
            port.send(_submit(1))
        port.close()


# ---- the child process ---------------------------------------------------------------------------------------


@pytest.fixture
def open_process():
    ports = []

    def make(config=None, **keywords):
        port = ProcessEnginePort(fake_config() if config is None else config, **keywords)
        ports.append(port)
        recorder = Recorder(port)
        port.start(recorder)
        recorder.state("ready")
        return port, recorder

    yield make
    for port in ports:
        port.close()


def test_a_killed_child_fails_its_requests_and_is_replaced(open_process):
    """Law: kill -9 ends every outstanding request with engine_failed, once; the state is restarting, then ready."""
    port, recorder = open_process()
    port.send(_submit(1, max_tokens=_ENDLESS))
    port.send(_submit(2, max_tokens=_ENDLESS))
    recorder.started(1).started(2)
    first_pid = port.info.pid
    os.kill(first_pid, signal.SIGKILL)
    assert recorder.end(1).code == recorder.end(2).code == "engine_failed"
    restarting = next(events.status for events in recorder.events if events.status.state == "restarting")
    assert "signal 9" in restarting.detail
    assert (restarting.num_running, restarting.num_failed, restarting.num_restarts) == (0, 2, 1)
    recorder.wait(lambda: recorder.events[-1].status.state == "ready")
    assert port.info.pid != first_pid
    port.send(_submit(3))
    assert isinstance(recorder.end(3), Finished)
    assert (port.status.num_submitted, port.status.num_failed, port.status.num_finished) == (3, 2, 1)
    assert port.status.num_restarts == 1


def test_a_child_that_keeps_dying_is_given_up(open_process):
    """Law: after the allowed restarts the state is failed and says why."""
    config = fake_config(runner=FakeRunnerFactory(exit_token=ord("!")))
    port, recorder = open_process(config, restarts=RestartPolicy(max_restarts=1))
    for request_id in (1, 2):
        recorder.wait(lambda: port.status.state == "ready")
        port.send(_submit(request_id, "!"))
        assert recorder.end(request_id).code == "engine_failed"
    recorder.state("failed")
    assert "exited with code 9; not started again after 1 restarts" in port.status.detail
    with pytest.raises(EngineUnavailable, match="exited with code 9"):
        port.send(_submit(3))


def test_the_child_ends_when_its_parent_is_gone(open_process):
    """Law: a closed pipe ends the child at once, whatever it is doing."""
    port, recorder = open_process(restarts=RestartPolicy(max_restarts=0))
    port.send(_submit(1, max_tokens=_ENDLESS))
    recorder.started(1)
    child = port._child
    with socket.socket(fileno=os.dup(child._connection.fileno())) as other:
        other.shutdown(socket.SHUT_RDWR)
    assert child.wait(_WAIT_S)
    assert recorder.end(1).code == "engine_failed"


def test_the_child_ignores_ctrl_c(open_process):
    """Law: SIGINT does not end the engine; the parent decides."""
    port, recorder = open_process()
    os.kill(port.info.pid, signal.SIGINT)
    port.send(_submit(1))
    assert isinstance(recorder.end(1), Finished)
    assert port.status.num_restarts == 0


def test_a_child_may_start_before_its_configuration_is_known(open_process, tmp_path):
    """Law: a process that was started early warms up and becomes the first child; the next one is started as always."""
    mark = tmp_path / "warm"
    spawned = spawn(partial(os.mkdir, mark))
    _wait_until(mark.exists)
    port, recorder = open_process(first=spawned)
    assert port.info.pid == spawned.process.pid
    os.kill(port.info.pid, signal.SIGKILL)
    recorder.wait(lambda: port.info.pid != spawned.process.pid)
    port.send(_submit(1))
    assert isinstance(recorder.end(1), Finished)


def test_a_process_that_is_not_used_is_gone_after_discard():
    """Law: discard ends a process that waits for its configuration, and may be called again."""
    spawned = spawn()
    spawned.discard()
    spawned.discard()
    assert spawned.process.returncode == -signal.SIGKILL


def test_a_process_whose_parent_needs_no_engine_ends_in_silence(capfd):
    """Law: the end of the parent before the configuration is no fault."""
    spawned = spawn()
    spawned.connection.close()
    spawned.socket.close()
    assert spawned.process.wait(_WAIT_S) == 0
    assert capfd.readouterr().err == ""


def test_a_warm_up_that_fails_is_the_state(tmp_path):
    """Law: what a warm-up raises reaches the parent as the reason of a failed engine."""
    port = ProcessEnginePort(fake_config(), first=spawn(partial(os.mkdir, tmp_path)))
    recorder = Recorder(port)
    port.start(recorder)
    recorder.state("failed")
    assert "File exists" in port.status.detail
    port.close()


def test_start_does_not_wait_for_the_child():
    """Law: the child loads while its parent goes on."""
    port = ProcessEnginePort(fake_config())
    begin = time.perf_counter()
    port.start(lambda events: None)
    elapsed_s = time.perf_counter() - begin
    assert port.status.state == "loading"
    port.close()
    assert port.status.state == "stopped"
    assert elapsed_s < 5


def test_a_configuration_that_cannot_be_pickled_is_refused_in_start():
    """Law: what cannot reach a child is an error of the caller, at once."""
    port = ProcessEnginePort(fake_config(loader=lambda: None))
    with pytest.raises((pickle.PicklingError, AttributeError)):
        port.start(lambda events: None)
    port.close()


def test_a_port_is_started_once(open_port):
    """Law: a second start is refused."""
    port, _ = open_port()
    with pytest.raises(RuntimeError, match="started"):
        port.start(lambda events: None)
