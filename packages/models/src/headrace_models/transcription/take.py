"""One audio while it is transcribed, as its caller sees it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from attrs import frozen

from headrace_models.transcription.errors import TranscriptionCancelled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from headrace_models.errors import ModelError
    from headrace_models.transcription.messages import Done, Progress
    from headrace_models.whisper.results import Transcription

__all__ = ["Take", "TakeTimings"]


@frozen(kw_only=True)
class TakeTimings:
    """Where the time of one take went, in seconds."""

    load_s: float
    """Loading the model; 0 if it was there."""
    queue_s: float
    """Waiting for other takes."""
    vad_s: float
    """Looking for speech."""
    transcribe_s: float
    total_s: float
    """From submitting to the transcript, reading the audio included."""


class Take:
    """An async iterator of progress; after it, the transcript.

    The first progress comes when the model has accepted the options. Cancelling the task that iterates cancels
    nothing by itself: `aclose` does. For one event loop.

    Args:
        cancel: asks the worker to drop it.
        clock: seconds, for `timings`.
    """

    def __init__(self, *, cancel: Callable[[], None], clock: Callable[[], float]) -> None:
        self._cancel, self._clock = cancel, clock
        self._submitted_at = clock()
        self._news: asyncio.Queue[Progress | None] = asyncio.Queue()
        self._was_read = asyncio.Event()
        self._is_over = asyncio.Event()
        self._error: ModelError | None = None
        self._transcript: Transcription | None = None
        self._timings: TakeTimings | None = None
        self._speech_spans: tuple[tuple[float, float], ...] | None = None
        self._is_accepted = False

    async def __aiter__(self) -> AsyncIterator[Progress]:
        """Yield progress; each segment comes once.

        Raises:
            AudioError: the audio cannot be transcribed.
            InvalidTranscribeOption: the model cannot do what the options say.
            TranscriptionError: the take ended without a transcript.
        """
        while (news := await self._news.get()) is not None:
            yield news
        # Whoever iterates again finds the end, too.
        self._news.put_nowait(None)
        if self._error is not None:
            raise self._error

    @property
    def transcript(self) -> Transcription:
        """The whole transcript; there once the iteration is over."""
        if self._transcript is None:
            raise TranscriptionCancelled("the take has no transcript: iterate over it to its end first")
        return self._transcript

    @property
    def timings(self) -> TakeTimings:
        """Where the time went; there once the iteration is over."""
        if self._timings is None:
            raise TranscriptionCancelled("the take has no timings: iterate over it to its end first")
        return self._timings

    @property
    def speech_spans(self) -> tuple[tuple[float, float], ...] | None:
        """Where somebody speaks, in seconds, from the first progress on; None if that was not asked for."""
        return self._speech_spans

    @property
    def is_accepted(self) -> bool:
        """Whether the model works on it, or has."""
        return self._is_accepted

    async def result(self) -> Transcription:
        """Wait for the transcript.

        Raises:
            As iterating does.
        """
        async for _ in self:
            pass
        return self.transcript

    async def aclose(self) -> None:
        """Cancel it wherever it is, and wait until nothing more is computed for it; harmless once it is over."""
        if not self._is_over.is_set():
            self._cancel()
            await self._is_over.wait()

    # ---- for the service -------------------------------------------------------------------------------------

    async def wait_read(self) -> None:
        """Wait until the audio is read; raises what is wrong with it."""
        await self._was_read.wait()
        if self._error is not None:
            raise self._error

    async def wait_over(self) -> None:
        """Wait until it has ended, in any way."""
        await self._is_over.wait()

    def take_read(self) -> None:
        """Note that the audio was read."""
        self._was_read.set()

    def take_progress(self, progress: Progress) -> None:
        """Pass progress on."""
        self._is_accepted = True
        self._speech_spans = progress.speech_spans
        self._news.put_nowait(progress)

    def finish(self, done: Done) -> None:
        """End with a transcript."""
        self._transcript = done.result
        self._timings = TakeTimings(
            load_s=done.timings.load_s,
            queue_s=done.timings.queue_s,
            vad_s=done.timings.vad_s,
            transcribe_s=done.timings.transcribe_s,
            total_s=self._clock() - self._submitted_at,
        )
        self._end()

    def fail(self, error: ModelError) -> None:
        """End with an error."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self._was_read.set()
        self._is_over.set()
        self._news.put_nowait(None)
