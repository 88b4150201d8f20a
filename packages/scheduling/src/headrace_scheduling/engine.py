"""The engine's loop: messages in, steps on the device, one `StepEvents` out per step."""

from __future__ import annotations

import os
import time
from logging import getLogger
from typing import TYPE_CHECKING

from headrace_scheduling.events import Cancelled, Failed
from headrace_scheduling.faults import log_fault
from headrace_scheduling.messages import (
    Cancel,
    Drain,
    EngineInfo,
    EngineMessage,
    EngineState,
    EngineStatus,
    Exclusive,
    Prefetch,
    Prepare,
    StepEvents,
    Stop,
    Submit,
)
from headrace_scheduling.operations import OperationQueue
from headrace_scheduling.rows import RowBook
from headrace_scheduling.scheduler import BatchScheduler, RowSpec, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace_scheduling.config import EngineConfig
    from headrace_scheduling.inbox import Inbox
    from headrace_scheduling.ports import LoadedModel, StepRunner

_logger = getLogger(__name__)
_MAX_IN_FLIGHT = 2


class EngineLoop:
    """Runs one loaded model until it is stopped or drained. Built and run on the engine's thread.

    Args:
        loaded: what the loader returned.
        runner: runs the steps.
        config: limits and operation handlers.
        inbox: where the port puts messages.
        publish: takes each `StepEvents` out of the engine.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        runner: StepRunner,
        config: EngineConfig,
        *,
        inbox: Inbox,
        publish: Callable[[StepEvents], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._info: EngineInfo | None = describe(loaded, config)
        self._eos_token_ids = self._info.eos_token_ids
        self._vocab_size = self._info.vocab_size
        self._runner = runner
        self._inbox = inbox
        self._send = publish
        self._scheduler = BatchScheduler(config.max_rows, self._info.max_context, prefill_chunk=config.prefill_chunk)
        self._book = RowBook(loaded.codec, clock)
        self._operations = OperationQueue(loaded, config.handlers)
        self._state: EngineState = "ready"
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._published: EngineStatus | None = None
        self._has_news = False

    def run(self) -> None:
        """Publish the engine's facts, then serve until `Stop`, or until everything is done after `Drain`.

        Raises:
            Exception: what the runner's `reset` raised; the engine cannot go on and its port ends what is outstanding.
        """
        self._publish()
        while self._receive():
            self._run_operations()
            self._run_step()
            self._publish()
        self._publish()

    # ---- messages in -----------------------------------------------------------------------------------------

    def _receive(self) -> bool:
        """Take all messages, waiting for one when there is nothing to do; False once the engine has stopped."""
        messages = self._inbox.take(block=self._is_idle())
        self._has_news = bool(messages)
        for message in messages:
            self._handle(message)
        if self._state == "draining" and self._is_idle(draining=True):
            self._state = "stopped"
        return self._state != "stopped"

    def _is_idle(self, *, draining: bool = False) -> bool:
        is_empty = self._book.is_empty and not self._operations.has_any and self._runner.num_in_flight == 0
        return is_empty and (draining or self._state == "ready")

    def _handle(self, message: EngineMessage) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Cancel(request_id):
                if request_id in self._book:
                    self._remove(request_id)
                    self._book.end(request_id, Cancelled())
            case Exclusive() | Prepare():
                self._operations.add(message)
                if self._state != "ready":
                    self._operations.refuse_all(f"the engine is {self._state}")
            case Drain():
                self._state = "draining"
            case Stop():
                self._stop()
            case Prefetch():
                # A hint for the prefix cache; without one there is nothing to read ahead.
                return

    def _submit(self, message: Submit) -> None:
        self._book.open(message)
        if self._state != "ready":
            self._book.end(message.request_id, Failed(code="engine_failed", message=f"the engine is {self._state}"))
            return
        options, prompt_ids = message.request.options, message.request.prompt_ids
        foreign = _foreign_token(
            prompt_ids, [token_id for token_id, _ in options.sampling.logit_bias], self._vocab_size
        )
        if foreign is not None:
            # Refused here, because inside a step it would end the row's neighbours too.
            self._book.end(message.request_id, Failed(code="request_failed", message=foreign))
            return
        spec = RowSpec(
            request_id=message.request_id,
            prompt_ids=prompt_ids,
            max_tokens=message.max_tokens,
            sampling=options.sampling,
            eos_token_ids=frozenset() if options.ignore_eos or options.sampling.ignore_eos else self._eos_token_ids,
            serial=message.serial,
        )
        try:
            self._scheduler.submit(spec)
        except ValueError as error:
            self._book.end(message.request_id, Failed(code="context_over_budget", message=str(error)))

    def _stop(self) -> None:
        for request_id in self._book.ids:
            self._remove(request_id)
            self._book.end(request_id, Cancelled())
        self._operations.refuse_all("the engine was stopped")
        self._state = "stopped"

    def _run_operations(self) -> None:
        self._scheduler.hold = self._operations.has_exclusive
        self._operations.run_one_preparation()
        if self._operations.has_exclusive and not self._scheduler.num_running and not self._runner.num_in_flight:
            self._operations.run_exclusive()
            self._scheduler.hold = False

    # ---- steps -----------------------------------------------------------------------------------------------

    def _run_step(self) -> None:
        step = self._scheduler.schedule()
        try:
            if step is not None:
                self._dispatch(step)
            # With nothing to overlap, waiting for a second step would only delay the tokens.
            if self._runner.num_in_flight == _MAX_IN_FLIGHT or (step is None and self._runner.num_in_flight):
                self._collect()
        except Exception as error:  # noqa: BLE001 - a device may raise anything; the rows that ran end, the engine goes on
            self._fail_running(error)

    def _dispatch(self, step: Step) -> None:
        self._num_steps += 1
        self._num_prompt_tokens += sum(len(part.token_ids) for part in step.prefills)
        broken = [
            part.request_id
            for part in step.prefills
            if part.opening is not None and not self._book.admit(part.request_id)
        ]
        # A slice may take seconds, and dispatching may wait for it: tell before what is known by now.
        if step.prefills or self._has_news:
            self._publish()
        self._runner.dispatch(step)
        for request_id in broken:
            self._remove(request_id)

    def _collect(self) -> None:
        for gain in self._scheduler.apply(self._runner.collect()):
            if gain.request_id in self._book and not self._book.take(gain):
                self._remove(gain.request_id)

    def _remove(self, request_id: int) -> None:
        slot = self._scheduler.remove(request_id)
        if slot is not None:
            self._runner.release(slot)

    def _fail_running(self, error: Exception) -> None:
        log_fault(_logger, "a step failed", error)
        message = f"the engine failed in a step ({type(error).__name__}) while this request ran; send it again"
        failed = Failed(code="engine_failed", message=message)
        for request_id in self._scheduler.running_ids:
            self._scheduler.remove(request_id)
            if request_id in self._book:
                self._book.end(request_id, failed)
        self._runner.reset()

    # ---- events out ------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        status = self._make_status()
        rows = self._book.drain_events()
        operations = self._operations.drain_results()
        if rows or operations or status != self._published or self._info is not None:
            self._published = status
            info, self._info = self._info, None
            self._send(StepEvents(status=status, rows=rows, operations=operations, info=info))

    def _make_status(self) -> EngineStatus:
        totals = self._book.totals
        return EngineStatus(
            state=self._state,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=totals.num_generated_tokens,
            num_submitted=totals.num_submitted,
            num_finished=totals.num_finished,
            num_failed=totals.num_failed,
            num_cancelled=totals.num_cancelled,
            kv_bytes=self._runner.kv_bytes,
        )


def _foreign_token(prompt_ids: Sequence[int], biased_ids: Sequence[int], vocab_size: int) -> str | None:
    """Return why a request names a token that the vocabulary lacks, or None."""
    for what, token_ids in (("prompt_ids", prompt_ids), ("sampling.logit_bias", biased_ids)):
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            return (
                f"{what} holds token ids from {min(token_ids)} to {max(token_ids)}; they must be 0 to {vocab_size - 1}"
            )
    return None


def describe(loaded: LoadedModel, config: EngineConfig) -> EngineInfo:
    """State the facts of a loaded model under a configuration."""
    facts = loaded.model.config
    max_context = facts.max_positions if config.max_context is None else min(config.max_context, facts.max_positions)
    return EngineInfo(
        vocab_size=facts.vocab_size,
        max_context=max_context,
        max_rows=config.max_rows,
        eos_token_ids=facts.eos_token_ids,
        weights_bytes=loaded.model.weights_bytes,
        device=loaded.device,
        representation=loaded.representation,
        identity=loaded.identity,
        pid=os.getpid(),
    )


def load_engine(config: EngineConfig, *, inbox: Inbox, publish: Callable[[StepEvents], None]) -> EngineLoop:
    """Load the model and build its loop, both on the calling thread, which must also run it.

    Raises:
        Exception: what the loader or the runner raised.
    """
    loaded = config.loader()
    if config.make_runner is None:
        from headrace_scheduling.runner import make_mlx_runner

        runner = make_mlx_runner(loaded, config)
    else:
        runner = config.make_runner(loaded, config)
    return EngineLoop(loaded, runner, config, inbox=inbox, publish=publish)
