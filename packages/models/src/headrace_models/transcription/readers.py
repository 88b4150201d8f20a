"""Threads beside the model's: they read files and listen for speech while a batch is computed."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from attrs import define, evolve, field, frozen

from headrace_models.audio.speech import SpeechDetector
from headrace_models.transcription.errors import ErrorData
from headrace_models.transcription.hearing import Heard, hear, read_samples, to_array
from headrace_models.transcription.messages import Failed, Probabilities, Read, Samples, StartTake

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_models.audio.limits import AudioLimits
    from headrace_models.transcription.messages import Event, Feed, ReadAudio

    _Asked = TypeVar("_Asked")

__all__ = ["HeardTake", "Readers"]

_READ_AT_ONCE = 2
# Samples of takes that wait are held; beyond so many seconds, further files wait unread.
_MOST_HELD_S = 4 * 3600.0
# Of a file whose samples are asked for, as one message and in the service's memory.
_LONGEST_READ_S = 900.0


@frozen
class HeardTake:
    """A take whose audio was read; the request holds it no more."""

    request: StartTake
    heard: Heard


@define(eq=False)
class Readers:
    """Reads and listens on threads of its own. Every method may be called from any thread.

    Attributes:
        limits: of each file.
        hand_over: takes what was read, when a take can be transcribed; must not call a method of this.
        publish: takes what is to be told to the service; the same holds.
        fail: takes what one of the two raised: what it was given is lost, and somebody would wait for it without end.
    """

    limits: AudioLimits
    hand_over: Callable[[HeardTake], None]
    publish: Callable[[Event], None]
    fail: Callable[[Exception], None]
    _lock: threading.Lock = field(factory=threading.Lock)
    _unread: deque[StartTake] = field(factory=deque[StartTake])
    _reading: set[int] = field(factory=set[int])
    _cancelled: set[int] = field(factory=set[int])
    _held_s: float = 0.0
    _detectors: dict[int, SpeechDetector] = field(factory=dict[int, SpeechDetector])
    _files: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(_READ_AT_ONCE, "headrace-read"))
    # One thread: a stream's pieces must not overtake one another.
    _streams: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(1, "headrace-listen"))

    def start(self, request: StartTake) -> None:
        """Read a take's audio as soon as there is room for it."""
        with self._lock:
            self._unread.append(request)
            self._read_more()

    def cancel(self, request_id: int) -> bool:
        """Drop a take that is not read yet; whether it was here."""
        with self._lock:
            if request_id in self._reading:
                # Its thread tells when it has ended.
                self._cancelled.add(request_id)
                return True
            left = deque(request for request in self._unread if request.request_id != request_id)
            was_here = len(left) < len(self._unread)
            self._unread = left
        if was_here:
            self.publish(Failed(request_id=request_id, error=None))
        return was_here

    def release(self, duration_s: float) -> None:
        """Note that a take's samples are held no more."""
        with self._lock:
            self._held_s -= duration_s
            self._read_more()

    def read(self, message: ReadAudio) -> None:
        """Read a file for its samples."""
        self._files.submit(self._guard, self._read, message)

    def feed(self, message: Feed) -> None:
        """Listen to a stream's next samples."""
        self._streams.submit(self._guard, self._feed, message)

    def drop(self, detector_id: int) -> None:
        """Forget a stream."""
        self._streams.submit(self._detectors.pop, detector_id, None)

    def close(self) -> None:
        """Start nothing more; what runs ends by itself."""
        with self._lock:
            self._unread.clear()
        self._files.shutdown(wait=False, cancel_futures=True)
        self._streams.shutdown(wait=False, cancel_futures=True)

    def _read_more(self) -> None:
        while self._unread and len(self._reading) < _READ_AT_ONCE and self._held_s < _MOST_HELD_S:
            request = self._unread.popleft()
            self._reading.add(request.request_id)
            self._files.submit(self._guard, self._hear, request)

    def _guard(self, work: Callable[[_Asked], None], asked: _Asked) -> None:
        try:
            work(asked)
        except Exception as error:  # noqa: BLE001 - an executor would keep it to itself
            self.fail(error)

    def _hear(self, request: StartTake) -> None:
        found: Heard | ErrorData
        try:
            found = hear(request.audio, self.limits, request.speech)
        except Exception as error:  # noqa: BLE001 - whatever a library raises ends this take and no other
            found = ErrorData.of(error)
        # Together: a take is always either here or handed over, so that a cancel that is not for us comes after the
        # take, and so does whoever submits when told that this was read. Neither callable comes back here.
        with self._lock:
            self._reading.discard(request.request_id)
            is_cancelled = request.request_id in self._cancelled
            self._cancelled.discard(request.request_id)
            if is_cancelled:
                self.publish(Failed(request_id=request.request_id, error=None))
            elif isinstance(found, ErrorData):
                self.publish(Failed(request_id=request.request_id, error=found))
            else:
                self._held_s += found.duration_s
                self.publish(Read(request_id=request.request_id))
                self.hand_over(HeardTake(evolve(request, audio=b""), found))
            self._read_more()

    def _read(self, message: ReadAudio) -> None:
        try:
            limits = evolve(self.limits, max_duration_s=min(_LONGEST_READ_S, self.limits.max_duration_s))
            samples = read_samples(message.audio, limits)
            self.publish(Read(request_id=message.request_id, samples=Samples(samples.astype("<f4").tobytes())))
        except Exception as error:  # noqa: BLE001 - as above
            self.publish(Failed(request_id=message.request_id, error=ErrorData.of(error)))

    def _feed(self, message: Feed) -> None:
        try:
            if message.detector_id not in self._detectors:
                self._detectors[message.detector_id] = SpeechDetector.load()
            values = self._detectors[message.detector_id].feed(to_array(message.audio))
            self.publish(Probabilities(request_id=message.request_id, values=tuple(values)))
        except Exception as error:  # noqa: BLE001 - as above
            self.publish(Failed(request_id=message.request_id, error=ErrorData.of(error)))
