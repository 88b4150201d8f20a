"""The engine for programs without an event loop: open it, generate, close it."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Literal, Self

from attrs import evolve, frozen

from headrace_scheduling.config import EngineConfig, OperationHandler
from headrace_scheduling.errors import EngineFailed, EngineUnavailable, GenerationCancelled, RequestRefused
from headrace_scheduling.events import Failed, Finished
from headrace_scheduling.messages import Cancel, EngineInfo, EngineStatus, OperationResult, Prepare, StepEvents, Submit
from headrace_scheduling.operations import EncodeTexts, encode_texts
from headrace_scheduling.placement import place
from headrace_scheduling.requests import GenerateOptions, GenerationRequest, RequestShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from headrace_scheduling.messages import RowEvents
    from headrace_scheduling.ports import EnginePort, ModelLoader


@frozen(kw_only=True)
class GenerationResult:
    """One finished generation; a final EOS is neither in the text nor in the ids."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished


class Engine:
    """A loaded model that generates for many prompts at once. Make one with `Engine.open`; use it from any thread."""

    def __init__(self, port: EnginePort) -> None:
        self._port = port
        self._ids = itertools.count(1)
        self._changed = threading.Condition()
        self._rows: dict[int, list[RowEvents]] = {}
        self._results: dict[int, OperationResult] = {}

    @classmethod
    def open(
        cls,
        loader: ModelLoader,
        *,
        transport: Literal["thread", "process"] = "thread",
        max_rows: int = 8,
        max_context: int | None = None,
        prefill_chunk: int = 512,
        handlers: Mapping[type, OperationHandler] | None = None,
    ) -> Self:
        """Load a model and return its engine, ready.

        Args:
            loader: called on the engine's thread; picklable for the process transport.
            transport: `process` keeps the model out of this process.
            max_rows: most rows that run at once.
            max_context: most positions of a row; None takes the model's own limit.
            prefill_chunk: most prompt tokens of one step.
            handlers: operation type -> handler, for `Exclusive` and `Prepare` messages.

        Raises:
            EngineUnavailable: the model could not be loaded.
        """
        config = EngineConfig(
            loader=loader,
            max_rows=max_rows,
            max_context=max_context,
            prefill_chunk=prefill_chunk,
            handlers=handlers or {},
        )
        return cls.open_config(config, transport=transport)

    @classmethod
    def open_config(cls, config: EngineConfig, *, transport: Literal["thread", "process"] = "thread") -> Self:
        """As `open`, from a whole configuration."""
        config = evolve(config, handlers={EncodeTexts: encode_texts, **config.handlers})
        engine = cls(_make_port(config, transport))
        engine._start()
        return engine

    @property
    def info(self) -> EngineInfo:
        """Facts of the loaded engine.

        Raises:
            EngineUnavailable: it is not ready.
        """
        info, status = self._port.info, self._port.status
        if info is None or status.state != "ready":
            raise EngineUnavailable(f"the engine is {status.state}: {status.detail}")
        return info

    @property
    def status(self) -> EngineStatus:
        """The last published status."""
        return self._port.status

    def generate(
        self, prompts: Sequence[str | Sequence[int]], options: GenerateOptions | None = None
    ) -> list[GenerationResult]:
        """Generate for every prompt, batched, and return the results in the order of the prompts.

        Args:
            prompts: texts, which are encoded as they are without a chat template, or token ids.
            options: for all prompts.

        Raises:
            EngineUnavailable: the engine is not ready.
            ContextOverBudget: a prompt does not fit; nothing was submitted.
            RequestRefused: a prompt is empty, or the text of a row could not be made.
            EngineFailed: the engine failed.
        """
        options = GenerateOptions() if options is None else options
        info = self.info
        encoded = self._encode(prompts)
        shapes = [RequestShape(num_prompt_tokens=len(ids), max_tokens=options.max_tokens) for ids in encoded]
        placements = [place(info, shape) for shape in shapes]
        request_ids = [next(self._ids) for _ in encoded]
        self._rows.update({request_id: [] for request_id in request_ids})
        try:
            for request_id, prompt_ids, placement in zip(request_ids, encoded, placements, strict=True):
                request = GenerationRequest(prompt_ids=prompt_ids, options=options)
                is_serial = placement.mechanism == "serial"
                self._port.send(
                    Submit(request_id=request_id, request=request, max_tokens=placement.max_tokens, serial=is_serial)
                )
            return [self._wait_result(request_id) for request_id in request_ids]
        finally:
            self._forget(request_ids)

    def close(self) -> None:
        """Stop the engine and free the model. Idempotent."""
        self._port.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._port.start(self._on_events)
        with self._changed:
            self._changed.wait_for(lambda: self._port.status.state in ("ready", "failed", "stopped"))
        status = self._port.status
        if status.state != "ready":
            self._port.close()
            raise EngineUnavailable(f"the engine is {status.state}: {status.detail}")

    def _on_events(self, events: StepEvents) -> None:
        with self._changed:
            for row in events.rows:
                if row.request_id in self._rows:
                    self._rows[row.request_id].append(row)
            for result in events.operations:
                self._results[result.operation_id] = result
            self._changed.notify_all()

    def _encode(self, prompts: Sequence[str | Sequence[int]]) -> list[tuple[int, ...]]:
        texts = tuple(prompt for prompt in prompts if isinstance(prompt, str))
        if not texts:
            return [tuple(prompt) for prompt in prompts if not isinstance(prompt, str)]
        operation_id = next(self._ids)
        self._port.send(Prepare(operation_id, EncodeTexts(texts)))
        with self._changed:
            self._changed.wait_for(lambda: operation_id in self._results)
            result = self._results.pop(operation_id)
        if result.error is not None or not isinstance(result.value, tuple):
            raise EngineFailed(f"the prompts could not be encoded: {result.error}")
        encoded = iter(result.value)
        return [next(encoded) if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]

    def _wait_result(self, request_id: int) -> GenerationResult:
        rows = self._rows[request_id]
        with self._changed:
            self._changed.wait_for(lambda: bool(rows) and rows[-1].end is not None)
        end = rows[-1].end
        if isinstance(end, Failed):
            raise EngineFailed(end.message) if end.code == "engine_failed" else RequestRefused(end.message)
        if not isinstance(end, Finished):
            raise GenerationCancelled("the engine was stopped while this request ran")
        deltas = [row.delta for row in rows if row.delta is not None]
        return GenerationResult(
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
            finished=end,
        )

    def _forget(self, request_ids: Sequence[int]) -> None:
        """Stop listening; rows that still run are cancelled."""
        for request_id in request_ids:
            rows = self._rows.pop(request_id)
            if not rows or rows[-1].end is None:
                self._port.send(Cancel(request_id))


def _make_port(config: EngineConfig, transport: Literal["thread", "process"]) -> EnginePort:
    if transport == "process":
        from headrace_scheduling.process_port import ProcessEnginePort

        return ProcessEnginePort(config)
    if transport == "thread":
        from headrace_scheduling.thread_port import ThreadEnginePort

        return ThreadEnginePort(config)
    raise ValueError(f"transport is {transport!r}; it must be 'thread' or 'process'")
