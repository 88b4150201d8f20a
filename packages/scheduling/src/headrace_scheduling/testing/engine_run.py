"""An engine on a fake step runner, run to its end on the calling thread, with messages between its steps."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from headrace_scheduling.assembly import make_loop
from headrace_scheduling.inbox import Inbox
from headrace_scheduling.messages import Drain, Submit
from headrace_scheduling.requests import GenerateOptions, GenerationRequest
from headrace_scheduling.testing.loading import fake_config
from headrace_scheduling.testing.steps import FakeStepRunner

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace_scheduling.config import OperationHandler
    from headrace_scheduling.events import RowEnd
    from headrace_scheduling.grammars import CompiledGrammar
    from headrace_scheduling.messages import EngineMessage, OperationResult, RowEvents, StepEvents
    from headrace_scheduling.steps import Step
    from headrace_scheduling.testing.loading import FakeLoader


def make_submit(
    request_id: int,
    prompt: str = "abc",
    max_tokens: int = 5,
    *,
    serial: bool = False,
    about: Mapping[str, Any] | None = None,
    **options: Any,
) -> Submit:
    """Make a `Submit` of a prompt's bytes.

    Args:
        about: further fields of the request.
        options: fields of its `GenerateOptions`.
    """
    request = GenerationRequest(
        prompt_ids=tuple(prompt.encode()), options=GenerateOptions(**options), **({} if about is None else about)
    )
    return Submit(request_id=request_id, request=request, max_tokens=max_tokens, serial=serial)


class ScriptedInbox(Inbox):
    """Where the engine would wait for the next message to come, it gets the next of `later`, then a `Drain`."""

    def __init__(self) -> None:
        super().__init__()
        self.later: deque[EngineMessage] = deque()

    def take(self, *, block: bool) -> list[EngineMessage | CompiledGrammar]:
        """Take what there is; never wait."""
        messages = super().take(block=False)
        if messages or not block:
            return messages
        return [self.later.popleft() if self.later else Drain()]


class EngineRun:
    """An engine whose messages come from a script, and what it did.

    Args:
        script: number of a step, counted from 1 -> messages that arrive while it is dispatched.
        loader, max_rows, prefill_chunk, handlers, prompt_cache_bytes, kv_budget_bytes: as in `fake_config`.
        runner: arguments of `FakeStepRunner`.

    Attributes:
        steps: what was dispatched.
        events: what was published.
        now: the clock; every look at it takes a second.
    """

    def __init__(
        self,
        *,
        script: dict[int, list[EngineMessage]] | None = None,
        loader: FakeLoader | None = None,
        max_rows: int = 4,
        prefill_chunk: int = 512,
        handlers: Mapping[type, OperationHandler] | None = None,
        prompt_cache_bytes: int = 0,
        kv_budget_bytes: int | None = None,
        **runner: Any,
    ) -> None:
        self.script = {} if script is None else script
        self.inbox = ScriptedInbox()
        self.steps: list[Step] = []
        self.events: list[StepEvents] = []
        self.now = 0.0
        self.runner = FakeStepRunner(on_step=self._on_step, **runner)
        config = fake_config(
            loader=loader,
            max_rows=max_rows,
            prefill_chunk=prefill_chunk,
            handlers=handlers,
            prompt_cache_bytes=prompt_cache_bytes,
            kv_budget_bytes=kv_budget_bytes,
        )
        self.loop = make_loop(
            config.loader(), self.runner, config, inbox=self.inbox, publish=self.events.append, clock=self._clock
        )

    def run(self, *messages: EngineMessage, later: Sequence[EngineMessage] = ()) -> EngineRun:
        """Send messages, then each of `later` once everything before has ended, and run until all is done."""
        for message in messages:
            self.inbox.put(message)
        self.inbox.later.extend(later)
        self.loop.run()
        return self

    def rows(self, request_id: int, choice: int = 0) -> list[RowEvents]:
        """Return the events of one row."""
        rows = [row for events in self.events for row in events.rows if row.request_id == request_id]
        return [row for row in rows if row.choice == choice]

    def text(self, request_id: int, choice: int = 0) -> str:
        """Return all text of one row."""
        return "".join(row.delta.text for row in self.rows(request_id, choice) if row.delta is not None)

    def ends(self, request_id: int, choice: int = 0) -> Sequence[RowEnd]:
        """Return every end of one row; a right engine gives one."""
        return [row.end for row in self.rows(request_id, choice) if row.end is not None]

    def end(self, request_id: int, choice: int = 0) -> Any:
        """Return the one end of a row."""
        (end,) = self.ends(request_id, choice)
        return end

    def results(self) -> dict[int, OperationResult]:
        """Return the results of operations by id."""
        return {result.operation_id: result for events in self.events for result in events.operations}

    def _clock(self) -> float:
        self.now += 1.0
        return self.now

    def _on_step(self, step: Step) -> None:
        self.steps.append(step)
        for message in self.script.get(len(self.steps), ()):
            self.inbox.put(message)
