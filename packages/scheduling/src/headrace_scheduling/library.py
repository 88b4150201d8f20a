"""The engine for programs without an event loop: open it, generate, close it."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Literal, Self

from attrs import evolve, frozen

from headrace_scheduling.config import DEFAULT_PROMPT_CACHE_BYTES, EngineConfig, OperationHandler
from headrace_scheduling.errors import EngineFailed
from headrace_scheduling.events import Finished
from headrace_scheduling.messages import Cancel, EngineInfo, EngineStatus, OperationResult, Prepare, StepEvents, Submit
from headrace_scheduling.operations import EncodeTexts, encode_texts
from headrace_scheduling.placement import place
from headrace_scheduling.requests import GenerateOptions, GenerationRequest, RequestShape
from headrace_scheduling.steps import RowId
from headrace_scheduling.stream import error_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from headrace_kvcache import KVScheme
    from headrace_sampling import TokenLogprobs
    from headrace_scheduling.messages import RowEvents
    from headrace_scheduling.ports import EnginePort, ModelLoader


@frozen(kw_only=True)
class GenerationResult:
    """One finished generation; a final EOS is neither in the text nor in the ids.

    Attributes:
        logprobs: one per token id, if the options ask for log-probabilities.
        choice: which of a prompt's choices it is.
        prompt_logprobs: on choice 0, one per prompt token after the first, if the options ask for them.
    """

    text: str
    token_ids: tuple[int, ...]
    finished: Finished
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Engine:
    """A loaded model that generates for many prompts at once. Make one with `Engine.open`; use it from any thread."""

    def __init__(self, port: EnginePort) -> None:
        self._port = port
        self._ids = itertools.count(1)
        self._changed = threading.Condition()
        self._rows: dict[RowId, list[RowEvents]] = {}
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
        kv_scheme: KVScheme | None = None,
        kv_budget_bytes: int | None = None,
        prompt_cache_bytes: int = DEFAULT_PROMPT_CACHE_BYTES,
        handlers: Mapping[type, OperationHandler] | None = None,
    ) -> Self:
        """Load a model and return its engine, ready.

        Args:
            loader: called on the engine's thread; picklable for the process transport.
            transport: `process` keeps the model out of this process.
            max_rows: most rows that run at once.
            max_context: most positions of a row; None takes the model's own limit.
            prefill_chunk: most prompt tokens of one step.
            kv_scheme: how keys and values are stored; None keeps them as they come.
            kv_budget_bytes: most bytes of the rows' slots; None for no limit.
            prompt_cache_bytes: most bytes of stored prefixes; 0 stores none.
            handlers: operation type -> handler, for `Exclusive` and `Prepare` messages.

        Raises:
            EngineUnavailable: the model could not be loaded.
        """
        config = EngineConfig(
            loader=loader,
            max_rows=max_rows,
            max_context=max_context,
            prefill_chunk=prefill_chunk,
            kv_scheme=kv_scheme,
            kv_budget_bytes=kv_budget_bytes,
            prompt_cache_bytes=prompt_cache_bytes,
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
            raise status.refusal()
        return info

    @property
    def status(self) -> EngineStatus:
        """The last published status."""
        return self._port.status

    def generate(
        self, prompts: Sequence[str | Sequence[int]], options: GenerateOptions | None = None
    ) -> list[GenerationResult]:
        """Generate for every prompt, batched, and return the results in the order of the prompts.

        With `options.num_choices` above 1 each prompt has that many results, one after the other.

        Args:
            prompts: texts, which are encoded as they are without a chat template, or token ids.
            options: for all prompts.

        Raises:
            EngineUnavailable: the engine is not ready.
            ContextOverBudget: a prompt does not fit; nothing was submitted.
            RequestRefused: a prompt is empty, or the text of a row could not be made.
            QueueFull: there are more prompts than rows that may wait.
            EngineFailed: the engine failed.
        """
        options = GenerateOptions() if options is None else options
        requests = [GenerationRequest(prompt_ids=ids, options=options) for ids in self._encode(prompts)]
        return [result for choices in self.run(requests) for result in choices]

    def run(self, requests: Sequence[GenerationRequest]) -> list[list[GenerationResult]]:
        """Run requests of any kinds in one batch and return the choices of each, in the order of the requests.

        Raises:
            EngineUnavailable: the engine is not ready.
            ContextOverBudget: a prompt does not fit; nothing was submitted.
            RequestRefused: a prompt is empty, a grammar cannot be used, or the text of a row could not be made.
            QueueFull: there are more requests than rows that may wait.
            DeadlineExceeded: a request's time was over.
            EngineFailed: the engine failed.
        """
        info = self.info
        placements = [place(info, RequestShape.of(request)) for request in requests]
        rows = [
            [RowId(request_id, choice) for choice in range(request.options.num_choices)]
            for request in requests
            for request_id in [next(self._ids)]
        ]
        row_ids = [row_id for choices in rows for row_id in choices]
        self._rows.update({row_id: [] for row_id in row_ids})
        try:
            for choices, request, placement in zip(rows, requests, placements, strict=True):
                is_serial = placement.mechanism == "serial"
                request_id = choices[0].request_id
                self._port.send(
                    Submit(request_id=request_id, request=request, max_tokens=placement.max_tokens, serial=is_serial)
                )
            return [[self._wait_result(row_id) for row_id in choices] for choices in rows]
        finally:
            self._forget(row_ids)

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
            raise status.refusal()

    def _on_events(self, events: StepEvents) -> None:
        with self._changed:
            for row in events.rows:
                events_of_row = self._rows.get(RowId(row.request_id, row.choice))
                if events_of_row is not None:
                    events_of_row.append(row)
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

    def _wait_result(self, row_id: RowId) -> GenerationResult:
        rows = self._rows[row_id]
        with self._changed:
            self._changed.wait_for(lambda: bool(rows) and rows[-1].end is not None)
        end = rows[-1].end
        assert end is not None
        error = error_of(end)
        if error is not None or not isinstance(end, Finished):
            raise error or EngineFailed("the generation ended without a reason")
        deltas = [row.delta for row in rows if row.delta is not None]
        return GenerationResult(
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
            finished=end,
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
            choice=row_id.choice,
            prompt_logprobs=next((row.prompt_logprobs for row in rows if row.prompt_logprobs), ()),
        )

    def _forget(self, row_ids: Sequence[RowId]) -> None:
        """Stop listening; requests that still run are cancelled."""
        running: set[int] = set()
        for row_id in row_ids:
            rows = self._rows.pop(row_id)
            if not rows or rows[-1].end is None:
                running.add(row_id.request_id)
        for request_id in running:
            self._port.send(Cancel(request_id))


def _make_port(config: EngineConfig, transport: Literal["thread", "process"]) -> EnginePort:
    if transport == "process":
        from headrace_scheduling.process_port import ProcessEnginePort

        return ProcessEnginePort(config)
    if transport == "thread":
        from headrace_scheduling.thread_port import ThreadEnginePort

        return ThreadEnginePort(config)
    raise ValueError(f"transport is {transport!r}; it must be 'thread' or 'process'")
