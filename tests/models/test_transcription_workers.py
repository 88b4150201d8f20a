"""Both ends of the way to the model's process: whatever goes wrong there ends it, and never leaves somebody waiting."""

import os
import struct
import threading

import pytest

from headrace_models.transcription import worker_process, workers
from headrace_models.transcription.messages import LoadModel, WorkerConfig
from headrace_models.transcription.workers import ProcessWorker


class Process:
    """A child that does nothing until it is killed."""

    pid = 7

    def __init__(self, *_, pass_fds, **__):
        self.fd = os.dup(pass_fds[0])
        self.is_dead = threading.Event()

    def kill(self):
        if not self.is_dead.is_set():
            self.is_dead.set()
            os.close(self.fd)

    def wait(self):
        assert self.is_dead.wait(5)
        return -9


@pytest.fixture
def start(monkeypatch):
    """Start a worker; returns it with what collects how it ended."""
    monkeypatch.setattr(workers.subprocess, "Popen", Process)

    def starting(loader=None):
        ended, causes = threading.Event(), []

        def end(cause):
            causes.append(cause)
            ended.set()

        worker = ProcessWorker(WorkerConfig(loader=loader, max_rows=1, limits=None), lambda _: None, end)
        return worker, ended, causes

    return starting


def test_a_message_that_cannot_be_sent_ends_the_process(start):
    """Such as a loader that cannot be pickled."""
    _, ended, causes = start(loader=lambda: None)
    assert ended.wait(5)
    assert causes == ["the process 7 that ran the model was ended by signal 9"]


def test_an_event_that_cannot_be_read_ends_the_process(start):
    """Bytes that are no event."""
    worker, ended, causes = start()
    worker.put(LoadModel())
    os.write(worker._process.fd, struct.pack("!i", 3) + b"abc")
    assert ended.wait(5)
    assert len(causes) == 1


@pytest.mark.parametrize(("raised", "code"), [(EOFError(), 0), (OSError(), 0), (ValueError("what was said"), 1)])
def test_the_child_ends_when_it_cannot_read(monkeypatch, caplog, raised, code):
    """With the parent gone as it should; with anything else as a failure, of which only the type is logged."""

    class Ended(Exception):
        pass

    class Connection:
        def recv(self):
            raise raised

    def end(found):
        raise Ended(found)

    monkeypatch.setattr(worker_process.os, "_exit", end)
    with pytest.raises(Ended, match=str(code)):
        worker_process._read(Connection(), lambda _: None)
    assert "what was said" not in caplog.text
    assert ("ValueError" in caplog.text) == bool(code)


def test_the_child_does_not_quote_what_it_raises(monkeypatch, caplog, capfd):
    """Its standard error goes to the operator's log."""

    def fail(_connection):
        raise RuntimeError("somebody said this"[::-1])

    monkeypatch.setattr(worker_process, "_serve", fail)
    monkeypatch.setattr(worker_process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(worker_process.faulthandler, "enable", lambda: None)
    reading, writing = os.pipe()
    try:
        assert worker_process.main([str(reading)]) == 1
    finally:
        os.close(writing)
    assert "RuntimeError" in caplog.text
    assert "somebody said this"[::-1] not in caplog.text + capfd.readouterr().err
