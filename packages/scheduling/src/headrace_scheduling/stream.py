"""One generation as its consumer sees it: an async iterator of text, then an end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from headrace_scheduling.errors import EngineFailed, GenerationCancelled, RequestRefused
from headrace_scheduling.events import Cancelled, Failed, Finished, RowEnd, TextDelta

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from headrace_scheduling.messages import RowEvents
    from headrace_scheduling.trace import PromptResponseTrace, TracePhase


class GenerationStream:
    """Iterates over the text of one generation; made by `GenerationGateway.run`, used on its event loop.

    What arrives while the consumer is busy is handed over as one delta. Leaving early, by `aclose`, by leaving the
    `async with` block or by cancelling the task that iterates, cancels the row and waits until the engine let it go.

    Raises (from iteration):
        EngineFailed: the engine failed while the request ran.
        RequestRefused: the request's own text could not be made, or it does not fit the engine.
        GenerationCancelled: the row was cancelled, by `aclose` or because the engine stopped.
    """

    def __init__(
        self, request_id: int, cancel: Callable[[int], None], trace: PromptResponseTrace | None = None
    ) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._trace = trace
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._end: RowEnd | None = None
        self._ended = asyncio.get_running_loop().create_future()
        self._wakeup: asyncio.Future[None] | None = None
        self._has_delta = False
        self._is_admitted = False
        self._mark("submitted", is_new=True)

    @property
    def finished(self) -> Finished:
        """How the generation ended.

        Raises:
            RuntimeError: it has not finished by itself.
        """
        if not isinstance(self._end, Finished):
            raise RuntimeError(  # noqa: TRY004 - a matter of time, not of types
                "the generation has not finished; iterate to its end first"
            )
        return self._end

    @property
    def is_ended(self) -> bool:
        """Whether the engine has let the row go; buffered text may still be waiting."""
        return self._end is not None

    def feed(self, events: RowEvents) -> None:
        """Take one step's events of this row. Called by the gateway on the event loop."""
        if events.admitted:
            self._mark("admitted", is_new=not self._is_admitted)
            self._is_admitted = True
        if events.delta is not None:
            self._mark("first_delta", is_new=not self._has_delta)
            self._has_delta = True
            if events.delta.text:
                self._texts.append(events.delta.text)
            self._token_ids.extend(events.delta.token_ids)
        if events.end is not None and self._end is None:
            self._end = events.end
            self._ended.set_result(None)
            self._mark("ended", is_new=True)
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        while not self._texts and not self._token_ids and self._end is None:
            await self._wait()
        if self._texts or self._token_ids:
            delta = TextDelta("".join(self._texts), tuple(self._token_ids))
            self._texts.clear()
            self._token_ids.clear()
            return delta
        raise self._outcome()

    async def aclose(self) -> None:
        """Cancel the row if it still runs, and wait until the engine has let it go. Idempotent."""
        if self._end is None:
            self._cancel(self.request_id)
        interrupted: asyncio.CancelledError | None = None
        while self._end is None:
            try:
                await asyncio.shield(self._ended)
            except asyncio.CancelledError as error:
                # The engine ends every row, at the latest when it dies; leaving sooner would leak the row's slot.
                interrupted = error
        self._texts.clear()
        self._token_ids.clear()
        if interrupted is not None:
            raise interrupted.with_traceback(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _wait(self) -> None:
        self._wakeup = asyncio.get_running_loop().create_future()
        try:
            await self._wakeup
        except asyncio.CancelledError:
            await self.aclose()
            raise
        finally:
            self._wakeup = None

    def _outcome(self) -> Exception:
        match self._end:
            case Failed(code="engine_failed", message=message):
                return EngineFailed(message)
            case Failed(message=message):
                return RequestRefused(message)
            case Cancelled():
                return GenerationCancelled("the generation was cancelled")
            case _:
                return StopAsyncIteration()

    def _mark(self, phase: TracePhase, *, is_new: bool) -> None:
        if self._trace is not None and is_new:
            self._trace.mark(phase)
