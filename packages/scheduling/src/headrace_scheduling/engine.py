"""The engine's loop: messages in, steps on the device, one `StepEvents` out per step."""

from __future__ import annotations

from itertools import cycle
from logging import getLogger
from typing import TYPE_CHECKING

from attrs import frozen

from headrace_kvcache import BudgetExceeded, PrefixNamespace
from headrace_scheduling.events import Cancelled, Failed, FailureCode
from headrace_scheduling.faults import log_fault
from headrace_scheduling.grammars import CompiledGrammar, GrammarQueue
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
from headrace_scheduling.steps import RowSpec, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace_sampling import GrammarState
    from headrace_scheduling.config import EngineConfig
    from headrace_scheduling.inbox import Inbox
    from headrace_scheduling.ports import LoadedModel, StepRunner
    from headrace_scheduling.prefix_archive import PrefixArchive
    from headrace_scheduling.requests import GenerationRequest
    from headrace_scheduling.scheduler import BatchScheduler
    from headrace_scheduling.steps import RowId, Step

_logger = getLogger(__name__)
_MAX_IN_FLIGHT = 2


@frozen(kw_only=True)
class EngineParts:
    """What an engine's loop works with."""

    loaded: LoadedModel
    runner: StepRunner
    scheduler: BatchScheduler
    info: EngineInfo
    archive: PrefixArchive | None = None


class EngineLoop:
    """Runs one loaded model until it is stopped or drained. Built and run on the engine's thread.

    Args:
        parts: model, runner and scheduler, and the facts to publish.
        config: limits and operation handlers.
        inbox: where the port puts messages.
        publish: takes each `StepEvents` out of the engine.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        parts: EngineParts,
        config: EngineConfig,
        *,
        inbox: Inbox,
        publish: Callable[[StepEvents], None],
        clock: Callable[[], float],
    ) -> None:
        self._facts = parts.info
        self._info: EngineInfo | None = parts.info
        self._runner = parts.runner
        self._scheduler = parts.scheduler
        self._archive = parts.archive
        self._max_waiting = config.max_waiting
        self._inbox = inbox
        self._send = publish
        self._book = RowBook(parts.loaded.codec, clock)
        self._operations = OperationQueue(parts.loaded, config.handlers)
        self._grammars: GrammarQueue | None = None
        if config.compile_grammar is not None:
            self._grammars = GrammarQueue(config.compile_grammar, parts.loaded, inbox.put)
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
        try:
            while self._receive():
                self._expire()
                self._run_operations()
                self._run_step()
                self._publish()
        finally:
            if self._grammars is not None:
                self._grammars.close()
        # Ends of requests go out first: nobody waits for the disk.
        self._publish()
        if self._archive is not None:
            self._archive.save()

    # ---- messages in -----------------------------------------------------------------------------------------

    def _receive(self) -> bool:
        """Take all messages, waiting for one when there is nothing to do; False once the engine has stopped."""
        messages = self._inbox.take(block=self._has_nothing_to_do())
        self._has_news = bool(messages)
        for message in messages:
            self._handle(message)
        if self._state == "draining" and self._book.is_empty and not self._is_busy():
            self._state = "stopped"
        return self._state != "stopped"

    def _has_nothing_to_do(self) -> bool:
        """Whether only a message can bring work: rows whose grammar is being compiled come by one, too."""
        return not self._is_busy() and not (self._state == "draining" and self._book.is_empty)

    def _is_busy(self) -> bool:
        has_rows = self._scheduler.num_running or self._scheduler.num_waiting
        return bool(has_rows or self._operations.has_any or self._runner.num_in_flight)

    def _handle(self, message: EngineMessage | CompiledGrammar) -> None:
        match message:
            case CompiledGrammar():
                self._queue_compiled(message)
            case Submit():
                self._submit(message)
            case Cancel(request_id):
                for row_id in self._book.rows_of(request_id):
                    self._retire(row_id)
                    self._book.end(row_id, Cancelled())
            case Exclusive() | Prepare():
                self._operations.add(message)
                if self._state != "ready":
                    self._operations.refuse_all(f"the engine is {self._state}")
            case Drain():
                self._state = "draining"
            case Stop():
                self._stop()
            case Prefetch():
                # A hint for a cold tier of the prefix cache; without one there is nothing to read ahead.
                return

    def _submit(self, message: Submit) -> None:
        rows = self._book.open(message)
        refusal = self._refusal(message.request, len(rows))
        if refusal is not None:
            self._refuse(rows, *refusal)
        elif message.request.grammar is not None and self._grammars is not None:
            self._grammars.start(message)
        else:
            self._queue(rows, message)

    def _queue_compiled(self, compiled: CompiledGrammar) -> None:
        rows = self._book.rows_of(compiled.submit.request_id)
        if compiled.error is not None:
            self._refuse(rows, "request_failed", f"the grammar cannot be used: {compiled.error}")
        elif rows:
            self._queue(rows, compiled.submit, compiled.states)

    def _queue(self, rows: Sequence[RowId], message: Submit, grammars: Sequence[GrammarState | None] = (None,)) -> None:
        try:
            self._scheduler.submit(
                [self._spec(row_id, message, grammar) for row_id, grammar in zip(rows, cycle(grammars), strict=False)]
            )
        except (ValueError, BudgetExceeded) as error:
            self._refuse(rows, "context_over_budget", str(error))

    def _refuse(self, rows: Sequence[RowId], code: FailureCode, reason: str) -> None:
        for row_id in rows:
            self._book.end(row_id, Failed(code=code, message=reason))

    def _refusal(self, request: GenerationRequest, num_rows: int) -> tuple[FailureCode, str] | None:
        """Return why a request cannot be queued. Inside a step it would end the row's neighbours too."""
        if self._state != "ready":
            return "engine_failed", f"the engine is {self._state}"
        if self._scheduler.num_waiting + num_rows > self._max_waiting:
            return "queue_full", f"{self._scheduler.num_waiting} rows wait, and at most {self._max_waiting} may"
        if request.grammar is not None and not self._facts.has_grammar:
            return "request_failed", "grammar is set, and this engine was opened without a grammar compiler"
        biased = [token_id for token_id, _ in request.options.sampling.logit_bias]
        foreign = _foreign_token(request.prompt_ids, biased, self._facts.vocab_size)
        return None if foreign is None else ("request_failed", foreign)

    def _spec(self, row_id: RowId, message: Submit, grammar: GrammarState | None) -> RowSpec:
        request = message.request
        options = request.options
        ignores_eos = options.ignore_eos or options.sampling.ignore_eos
        return RowSpec(
            row_id=row_id,
            prompt_ids=request.prompt_ids,
            max_tokens=message.max_tokens,
            sampling=options.sampling,
            eos_token_ids=frozenset() if ignores_eos else self._facts.eos_token_ids,
            serial=message.serial,
            is_batch=request.priority == "batch",
            namespace=self._namespace(request),
            session_id=request.session_id,
            stable_boundary=request.stable_boundary,
            grammar=grammar,
            # The other choices begin with a copy of the first one's prompt.
            prompt_logprobs=None if row_id.choice else options.prompt_logprobs,
        )

    def _namespace(self, request: GenerationRequest) -> PrefixNamespace | None:
        if not request.caches_prefix or request.options.prompt_logprobs is not None:
            return None
        return PrefixNamespace(scheme_key=self._facts.kv_scheme, tenant=request.tenant)

    def _stop(self) -> None:
        for row_id in self._book.ids:
            self._release(row_id)
            self._book.end(row_id, Cancelled())
        self._operations.refuse_all("the engine was stopped")
        self._state = "stopped"

    def _expire(self) -> None:
        for row_id in self._book.expired():
            self._retire(row_id)
            message = "the request's timeout_s passed before it ended; allow more time, or send it when less is waiting"
            self._book.end(row_id, Failed(code="deadline_exceeded", message=message))

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
        for snapshot in step.snapshots:
            self._copy(snapshot)
        if step.openings:
            step = self._seat(step)
        if not step.has_forwards:
            return
        self._num_steps += 1
        self._num_prompt_tokens += sum(len(part.token_ids) for part in step.prefills)
        # A slice may take seconds, and dispatching may wait for it: tell before what is known by now.
        if step.prefills or self._has_news:
            self._publish()
        self._runner.dispatch(step)

    def _seat(self, step: Step) -> Step:
        """Seat new rows; return the step without those that cannot be, which end alone."""
        failed: list[RowId] = []
        for opening in step.openings:
            row_id = opening.row_id
            num_cached = 0 if opening.prefix is None else opening.prefix.num_tokens
            try:
                self._runner.seat(opening)
            except Exception as error:  # noqa: BLE001 - a model or a stored prefix may raise anything; only its row ends
                log_fault(_logger, f"request {row_id.request_id} could not be seated", error)
                self._scheduler.remove(row_id)
                message = f"the request could not be started ({type(error).__name__}); see the server's log"
                self._book.end(row_id, Failed(code="request_failed", message=message))
                failed.append(row_id)
            else:
                if not self._book.admit(row_id, num_cached):
                    self._release(row_id)
                    failed.append(row_id)
            finally:
                if opening.prefix is not None:
                    opening.prefix.release()
        return step.without(frozenset(failed)) if failed else step

    def _collect(self) -> None:
        result = self._runner.collect()
        for row_id, reason in result.errors.items():
            if row_id in self._book:
                self._release(row_id)
                self._book.end(row_id, Failed(code="request_failed", message=reason))
        gains = self._scheduler.apply(result)
        ended = [gain.row_id for gain in gains if gain.row_id in self._book and not self._book.take(gain)]
        if ended and self._scheduler.prefixes.store is not None:
            # What is copied for the store comes after the ends are told: no client waits for it.
            self._publish()
        for row_id in ended:
            self._retire(row_id)

    # ---- rows that leave -------------------------------------------------------------------------------------

    def _copy(self, snapshot: Snapshot) -> None:
        """Copy a row's prefix for others; whatever goes wrong, the row goes on."""
        row_id, tokens = snapshot.row_id, self._scheduler.fed_tokens(snapshot.row_id)[: snapshot.num_tokens]
        try:
            prefix = self._runner.copy(snapshot)
        except Exception as error:  # noqa: BLE001 - a device may raise anything; a copy is never worth a row
            log_fault(_logger, f"the prefix of request {row_id.request_id} could not be copied", error)
            self._scheduler.dismiss_followers(row_id, snapshot.num_tokens)
        else:
            self._scheduler.keep(row_id, tokens, prefix)

    def _retire(self, row_id: RowId) -> None:
        """Take a row out, and store what it computed if that is worth it."""
        tokens = self._scheduler.kept_tokens(row_id)
        if tokens:
            first = self._scheduler.num_stored(row_id, tokens)
            self._copy(Snapshot(row_id=row_id, num_tokens=len(tokens), first=first))
        self._release(row_id)

    def _release(self, row_id: RowId) -> None:
        if self._scheduler.remove(row_id):
            self._runner.release(row_id)

    def _fail_running(self, error: Exception) -> None:
        log_fault(_logger, "a step failed", error)
        message = f"the engine failed in a step ({type(error).__name__}) while this request ran; send it again"
        failed = Failed(code="engine_failed", message=message)
        for row_id in self._scheduler.running_ids:
            self._scheduler.remove(row_id)
            if row_id in self._book:
                self._book.end(row_id, failed)
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
        totals, scheduler = self._book.totals, self._scheduler
        return EngineStatus(
            state=self._state,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=totals.num_generated_tokens,
            num_submitted=totals.num_submitted,
            num_finished=totals.num_finished,
            num_failed=totals.num_failed,
            num_cancelled=totals.num_cancelled,
            num_cached_tokens=totals.num_cached_tokens,
            num_prefix_hits=scheduler.prefixes.num_hits,
            num_prefix_misses=scheduler.prefixes.num_misses,
            kv_bytes=self._runner.kv_bytes,
            kv_reserved_bytes=0 if scheduler.budget is None else scheduler.budget.used_bytes,
            prefix_bytes=scheduler.prefixes.num_bytes,
        )


def _foreign_token(prompt_ids: Sequence[int], biased_ids: Sequence[int], vocab_size: int) -> str | None:
    """Return why a request names a token that the vocabulary lacks, or None."""
    for what, token_ids in (("prompt_ids", prompt_ids), ("sampling.logit_bias", biased_ids)):
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            return (
                f"{what} holds token ids from {min(token_ids)} to {max(token_ids)}; they must be 0 to {vocab_size - 1}"
            )
    return None
