"""The loop that owns the model: takes are read beside it, wait in order, and share its batches."""

from __future__ import annotations

import gc
import logging
import queue
import sys
import time
import traceback
from collections import deque
from typing import TYPE_CHECKING

from attrs import define, evolve, field

from headrace_models.errors import ModelError
from headrace_models.transcription.errors import ErrorData, TranscriptionUnavailable
from headrace_models.transcription.hearing import Heard, moved
from headrace_models.transcription.messages import (
    CancelTake,
    Done,
    DropDetector,
    Failed,
    Feed,
    Loaded,
    LoadModel,
    Message,
    NotLoaded,
    Progress,
    ReadAudio,
    StartTake,
    Stop,
    WorkerTimings,
)
from headrace_models.transcription.readers import HeardTake, Readers
from headrace_models.whisper.results import Transcription
from headrace_models.whisper.transcribing import Transcriber

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace_models.transcription.messages import Event, WorkerConfig
    from headrace_models.whisper.backend import WindowBackend
    from headrace_models.whisper.results import Segment
    from headrace_models.whisper.transcribing import TakeEvent

    _Inner = HeardTake | CancelTake | LoadModel | Stop | Exception

__all__ = ["Worker"]

_logger = logging.getLogger(__name__)


@define(eq=False)
class _Take:
    """A take whose audio was read."""

    request: StartTake
    heard: Heard
    heard_at: float = field(factory=time.perf_counter)
    started_at: float = 0.0
    load_s: float = 0.0

    @property
    def request_id(self) -> int:
        return self.request.request_id


@define(eq=False)
class Worker:
    """Runs takes until `Stop`. The model lives on the thread that calls `run`; `put` may be called from any.

    Attributes:
        publish: takes events; called from several threads.
    """

    config: WorkerConfig
    publish: Callable[[Event], None]
    _inbox: queue.SimpleQueue[_Inner] = field(factory=queue.SimpleQueue["_Inner"])
    _ready: deque[_Take] = field(factory=deque[_Take])
    _running: dict[int, _Take] = field(factory=dict[int, _Take])
    _backend: WindowBackend | None = None
    _transcriber: Transcriber | None = None
    _readers: Readers = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._readers = Readers(self.config.limits, self._inbox.put, self.publish, fail=self._inbox.put)

    def put(self, message: Message) -> None:
        """Take a message: reading begins at once, the rest at the next step's boundary."""
        match message:
            case StartTake():
                self._readers.start(message)
            case ReadAudio():
                self._readers.read(message)
            case Feed():
                self._readers.feed(message)
            case DropDetector(detector_id):
                self._readers.drop(detector_id)
            case CancelTake(request_id):
                if not self._readers.cancel(request_id):
                    self._inbox.put(message)
            case LoadModel() | Stop():
                self._inbox.put(message)

    def run(self) -> None:
        """Serve until `Stop`, then free the model and what its library keeps."""
        try:
            while self._take_in():
                self._admit()
                self._step()
        finally:
            self._readers.close()
            self._free()

    def _take_in(self) -> bool:
        """Handle every message that is there, waiting for one if there is nothing else to do; False to end."""
        return all(self._handle(message) for message in self._messages())

    def _messages(self) -> Iterator[_Inner]:
        if not self._running and not self._ready:
            yield self._inbox.get()
        while True:
            try:
                yield self._inbox.get_nowait()
            except queue.Empty:
                return

    def _handle(self, message: _Inner) -> bool:
        match message:
            case HeardTake(request, heard):
                self._ready.append(_Take(request, heard))
            case CancelTake(request_id):
                self._cancel(request_id)
            case LoadModel():
                self._load()
            case Exception():
                # A reader could not tell what it found: the end of this worker tells everybody.
                raise message
            case Stop():
                return False
        return True

    def _cancel(self, request_id: int) -> None:
        for take in [take for take in self._ready if take.request_id == request_id]:
            self._ready.remove(take)
            self._readers.release(take.heard.duration_s)
        for take_id, take in list(self._running.items()):
            if take.request_id == request_id:
                self._leave(take_id)
                if self._transcriber is not None:
                    self._transcriber.cancel(take_id)
        self.publish(Failed(request_id=request_id, error=None))

    def _leave(self, take_id: int) -> _Take:
        take = self._running.pop(take_id)
        self._readers.release(take.heard.duration_s)
        return take

    # ---- transcribing ----------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give takes that are ready to the model, in the order in which they became so."""
        while self._ready and len(self._running) < self.config.max_rows:
            take = self._ready[0]
            if take.heard.is_silent:
                self._ready.popleft()
                self._readers.release(take.heard.duration_s)
                self._end_silent(take, take.heard)
                continue
            if self._transcriber is None and not self._load():
                return
            self._ready.popleft()
            self._start(take, take.heard)

    def _load(self) -> bool:
        if self._transcriber is not None:
            return True
        started = time.perf_counter()
        try:
            self._backend = self.config.loader()
        except Exception as error:  # noqa: BLE001 - a loader may raise anything
            # Clients read what we wrote; what a library says may name the operator's files, and is for the log.
            _log_fault(f"the model could not be loaded ({error}),", error)
            reason = str(error) if isinstance(error, ModelError) else type(error).__name__
            told = ErrorData.of(TranscriptionUnavailable(f"the model cannot be loaded: {reason}"))
            self.publish(NotLoaded(told))
            while self._ready:
                take = self._ready.popleft()
                self._readers.release(take.heard.duration_s)
                self.publish(Failed(request_id=take.request_id, error=told))
            return False
        load_s = time.perf_counter() - started
        self._transcriber = Transcriber(self._backend, self.config.max_rows)
        for take in self._ready:
            take.load_s = load_s
        self.publish(Loaded(load_s))
        return True

    def _start(self, take: _Take, heard: Heard) -> None:
        assert self._transcriber is not None
        take.started_at = time.perf_counter()
        try:
            take_id = self._transcriber.add(heard.samples, take.request.options)
        except Exception as error:  # noqa: BLE001 - what the model refuses ends this take and no other
            self._readers.release(heard.duration_s)
            self.publish(Failed(request_id=take.request_id, error=ErrorData.of(error)))
            return
        # The spectrogram is made; the samples would only take room.
        take.heard = evolve(heard, samples=heard.samples[:0])
        self._running[take_id] = take
        self.publish(_progress(take, position_s=heard.offset_s))

    def _step(self) -> None:
        if self._transcriber is None or not self._running:
            return
        try:
            events = self._transcriber.step()
        except Exception as error:  # noqa: BLE001 - a batch that fails ends its takes; the next ones start afresh
            _log_fault("a batch of windows failed", error)
            failed = [self._leave(take_id) for take_id in list(self._running)]
            assert self._backend is not None
            self._transcriber = Transcriber(self._backend, self.config.max_rows)
            for take in failed:
                self.publish(Failed(request_id=take.request_id, error=ErrorData.of(error)))
            return
        for event in events:
            self._pass_on(self._running[event.take_id], event)

    def _pass_on(self, take: _Take, event: TakeEvent) -> None:
        offset_s = take.heard.offset_s
        segments = moved(event.segments, offset_s)
        self.publish(_progress(take, position_s=event.position_s + offset_s, segments=segments))
        if event.result is None:
            return
        self._leave(event.take_id)
        duration_s = take.heard.duration_s
        result = evolve(event.result, segments=moved(event.result.segments, offset_s), duration_s=duration_s)
        timings = WorkerTimings(
            load_s=take.load_s,
            queue_s=max(0.0, take.started_at - take.heard_at - take.load_s),
            vad_s=take.heard.vad_s,
            transcribe_s=time.perf_counter() - take.started_at,
        )
        self.publish(Done(request_id=take.request_id, result=result, timings=timings))

    def _end_silent(self, take: _Take, heard: Heard) -> None:
        self.publish(_progress(take, position_s=heard.duration_s))
        result = Transcription(
            text="",
            language=take.request.options.language or "",
            language_probability=None,
            duration_s=heard.duration_s,
            segments=(),
        )
        queue_s = time.perf_counter() - take.heard_at
        self.publish(
            Done(
                request_id=take.request_id,
                result=result,
                timings=WorkerTimings(vad_s=heard.vad_s, queue_s=queue_s),
            )
        )

    def _free(self) -> None:
        """Let go of the model and of what the allocator keeps of it, on the thread that made it."""
        self._backend = self._transcriber = None
        self._running.clear()
        self._ready.clear()
        gc.collect()
        if "mlx.core" in sys.modules:
            import mlx.core as mx

            mx.clear_cache()


def _progress(take: _Take, *, position_s: float, segments: tuple[Segment, ...] = ()) -> Progress:
    return Progress(
        request_id=take.request_id,
        segments=segments,
        position_s=position_s,
        duration_s=take.heard.duration_s,
        speech_spans=take.heard.spans,
    )


def _log_fault(what: str, error: Exception) -> None:
    """Log where an error was raised, as text: a kept traceback keeps frames, and with them arrays, alive."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _logger.error("%s with %s at\n%s", what, type(error).__qualname__, frames)
