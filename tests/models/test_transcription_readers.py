"""Reading beside the model: a take is cancelled before it is handed over, or after, and never between."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from headrace_models.audio import AudioLimits
from headrace_models.transcription import readers as readers_module
from headrace_models.transcription.hearing import Heard
from headrace_models.transcription.messages import Failed, Feed, Read, ReadAudio, Samples, StartTake, WorkerConfig
from headrace_models.transcription.readers import Readers
from headrace_models.transcription.worker import Worker
from headrace_models.whisper import TranscribeOptions

HEARD = Heard(samples=np.zeros(16_000, np.float32), offset_s=0.0, duration_s=1.0, spans=None, vad_s=0.0)


def asked(request_id):
    return StartTake(request_id=request_id, audio=Samples(b""), options=TranscribeOptions())


@pytest.fixture
def gate(monkeypatch):
    """Reading waits for it."""
    opened = threading.Event()

    def hear(*_):
        assert opened.wait(5)
        return HEARD

    monkeypatch.setattr(readers_module, "hear", hear)
    return opened


def test_a_cancel_that_comes_while_a_take_is_handed_over_comes_after_it(gate):
    """Whoever cancels is told that it is not here only when it has been handed over."""
    order, over = [], threading.Event()

    def cancel():
        order.append(("cancel", readers.cancel(1)))
        over.set()

    def publish(event):
        assert isinstance(event, Read)
        threading.Thread(target=cancel).start()
        assert not over.wait(0.05)
        order.append("read")

    readers = Readers(AudioLimits(), lambda heard: order.append(heard.request.request_id), publish, pytest.fail)
    gate.set()
    readers.start(asked(1))
    assert over.wait(5)
    readers.close()
    assert order == ["read", 1, ("cancel", False)]


def test_a_take_that_is_cancelled_while_it_is_read_is_not_handed_over(gate):
    """It ends once, as cancelled, and its neighbour is read."""
    told, handed, done, ended = [], [], threading.Event(), threading.Event()

    def hand_over(heard):
        handed.append(heard.request.request_id)
        done.set()

    def publish(event):
        told.append(event)
        if event.request_id == 1:
            ended.set()

    readers = Readers(AudioLimits(), hand_over, publish, pytest.fail)
    readers.start(asked(1))
    assert readers.cancel(1)
    gate.set()
    readers.start(asked(2))
    assert done.wait(5)
    assert ended.wait(5)
    readers.close()
    assert handed == [2]
    assert [event for event in told if event.request_id == 1] == [Failed(request_id=1, error=None)]
    assert not readers.cancel(1)


@pytest.mark.parametrize(
    "message",
    [
        asked(1),
        ReadAudio(request_id=1, audio=Samples(b"")),
        Feed(request_id=1, detector_id=1, audio=Samples(b"")),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_cannot_be_told_ends_the_worker(gate, monkeypatch, message):
    """An event that is lost on a reader's thread would be waited for without end."""
    monkeypatch.setattr(readers_module, "read_samples", lambda *_: HEARD.samples)
    monkeypatch.setattr(readers_module.SpeechDetector, "load", lambda: SimpleNamespace(feed=lambda _: [0.5]))

    def publish(event):
        raise ValueError("not to be told")

    gate.set()
    worker = Worker(WorkerConfig(loader=None, max_rows=1, limits=AudioLimits()), publish)
    worker.put(message)
    with pytest.raises(ValueError, match="not to be told"):
        worker.run()
