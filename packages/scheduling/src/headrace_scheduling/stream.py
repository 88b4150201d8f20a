"""One generation as its consumer sees it: an async iterator of text, then an end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from headrace_scheduling.errors import DeadlineExceeded, EngineFailed, GenerationCancelled, QueueFull, RequestRefused
from headrace_scheduling.events import Cancelled, Failed, Finished, RowEnd, TextDelta

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from headrace_sampling import TokenLogprobs
    from headrace_scheduling.messages import RowEvents
    from headrace_scheduling.trace import PromptResponseTrace, TracePhase


class GenerationStream:
    """Iterates over the text of one generation; made by `GenerationGateway.run`, used on its event loop.

    What arrives of a choice while the consumer is busy is handed over as one delta; each delta names its choice.
    Leaving early, by `aclose`, by leaving the `async with` block or by cancelling the task that iterates, cancels the
    request and waits until the engine let it go. The iteration ends once every choice has ended.

    Raises (from iteration, once all choices have ended):
        EngineFailed: the engine failed while the request ran.
        DeadlineExceeded: the request's time was over.
        QueueFull: too many rows waited in the engine.
        RequestRefused: the request's own text could not be made, or it does not fit the engine.
        GenerationCancelled: a row was cancelled, by `aclose` or because the engine stopped.
    """

    def __init__(
        self,
        request_id: int,
        cancel: Callable[[int], None],
        trace: PromptResponseTrace | None = None,
        *,
        num_choices: int = 1,
    ) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._trace = trace
        # Lists, joined when they are asked for: joining at every step would copy again and again what waits.
        self._waiting: dict[int, list[TextDelta]] = {}
        self._ends: dict[int, RowEnd] = {}
        self._num_choices = num_choices
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._wakeup: asyncio.Future[None] | None = None
        self._has_delta = False
        self._is_admitted = False
        self._mark("submitted")

    @property
    def finished(self) -> Finished:
        """How the generation ended: choice 0 of it.

        Raises:
            RuntimeError: it has not finished by itself.
        """
        return self.finished_choices[0]

    @property
    def finished_choices(self) -> tuple[Finished, ...]:
        """How each choice ended.

        Raises:
            RuntimeError: some have not finished by themselves.
        """
        ends = [self._ends.get(choice) for choice in range(self._num_choices)]
        finished = tuple(end for end in ends if isinstance(end, Finished))
        if len(finished) < self._num_choices:
            raise RuntimeError("the generation has not finished; iterate to its end first")
        return finished

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """One per prompt token after the first, if the options ask for them; there from the first delta on."""
        return self._prompt_logprobs

    @property
    def num_unread_tokens(self) -> int:
        """How many tokens wait for the consumer."""
        return sum(len(delta.token_ids) for deltas in self._waiting.values() for delta in deltas)

    def end_of(self, choice: int) -> RowEnd | None:
        """Return how a choice ended; None while it runs."""
        return self._ends.get(choice)

    @property
    def is_ended(self) -> bool:
        """Whether the engine has let every row go; buffered text may still be waiting."""
        return len(self._ends) == self._num_choices

    def feed(self, events: RowEvents) -> None:
        """Take one step's events of one row. Called by the gateway on the event loop."""
        if events.admitted and not self._is_admitted:
            self._is_admitted = True
            self._mark("admitted")
        if events.prompt_logprobs:
            self._prompt_logprobs = events.prompt_logprobs
        if events.delta is not None:
            if not self._has_delta:
                self._has_delta = True
                self._mark("first_delta")
            self._waiting.setdefault(events.choice, []).append(events.delta)
        if events.end is not None and not self.is_ended:
            self._ends[events.choice] = events.end
            if self.is_ended:
                self._ended.set_result(None)
                self._mark("ended")
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        while not self._waiting and not self.is_ended:
            await self._wait()
        if self._waiting:
            choice = next(iter(self._waiting))
            return TextDelta.joining(self._waiting.pop(choice))
        raise self._outcome()

    async def aclose(self) -> None:
        """Cancel the request if it still runs, and wait until the engine has let it go. Idempotent."""
        if not self.is_ended:
            self._cancel(self.request_id)
        interrupted: asyncio.CancelledError | None = None
        while not self.is_ended:
            try:
                await asyncio.shield(self._ended)
            except asyncio.CancelledError as error:
                # The engine ends every row, at the latest when it dies; leaving sooner would leak the row's slot.
                interrupted = error
        self._waiting.clear()
        if interrupted is not None:
            raise interrupted.with_traceback(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _wait(self) -> None:
        self._wakeup = self._loop.create_future()
        try:
            await self._wakeup
        except asyncio.CancelledError:
            await self.aclose()
            raise
        finally:
            self._wakeup = None

    def _outcome(self) -> Exception:
        for end in self._ends.values():
            error = error_of(end)
            if error is not None:
                return error
        return StopAsyncIteration()

    def _mark(self, phase: TracePhase) -> None:
        if self._trace is not None:
            self._trace.mark(phase)


def error_of(end: RowEnd) -> Exception | None:
    """Return the error that an end means to the one who asked; None if the row finished by itself."""
    match end:
        case Failed(code="engine_failed", message=message):
            return EngineFailed(message)
        case Failed(code="deadline_exceeded", message=message):
            return DeadlineExceeded(message)
        case Failed(code="queue_full", message=message):
            return QueueFull(message)
        case Failed(message=message):
            return RequestRefused(message)
        case Cancelled():
            return GenerationCancelled("the generation was cancelled")
        case _:
            return None
