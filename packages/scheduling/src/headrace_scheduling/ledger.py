"""What a transport knows of its engine: the last status, and who still waits for an end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from attrs import evolve

from headrace_scheduling.events import Cancelled
from headrace_scheduling.messages import (
    Drain,
    EngineInfo,
    EngineMessage,
    EngineStatus,
    Exclusive,
    OperationResult,
    Prepare,
    RowEvents,
    StepEvents,
    Submit,
)
from headrace_scheduling.steps import RowId

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_scheduling.events import RowEnd

_TOTALS = ("num_steps", "num_prompt_tokens", "num_generated_tokens", "num_submitted", "num_finished", "num_failed",
           "num_cancelled", "num_cached_tokens", "num_prefix_hits", "num_prefix_misses")  # fmt: skip


class PortLedger:
    """Shared by both transports, so that they refuse, report and end requests alike. Thread-safe.

    Totals go on growing when an engine is restarted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._on_events: Callable[[StepEvents], None] | None = None
        self._status = EngineStatus(state="loading")
        self._earlier: EngineStatus | None = None
        self._info: EngineInfo | None = None
        self._requests: set[RowId] = set()
        self._operations: set[int] = set()
        self._is_final = False

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    @property
    def status(self) -> EngineStatus:
        return self._status

    @property
    def has_outstanding(self) -> bool:
        """Whether some request or operation has not ended."""
        return bool(self._requests or self._operations)

    def open(self, on_events: Callable[[StepEvents], None]) -> None:
        """Set where events go.

        Raises:
            RuntimeError: the port was started before.
        """
        if self._on_events is not None:
            raise RuntimeError("the port was started before; a port is started once")
        self._on_events = on_events

    def pass_on(self, message: EngineMessage, put: Callable[[EngineMessage], None]) -> None:
        """Note what a message starts, and hand it to `put`.

        Raises:
            EngineUnavailable: the engine cannot take new work now.
        """
        with self._lock:
            if isinstance(message, (Submit, Exclusive, Prepare)):
                if self._status.state != "ready":
                    raise self._status.refusal()
                if isinstance(message, Submit):
                    choices = range(message.request.options.num_choices)
                    self._requests.update(RowId(message.request_id, choice) for choice in choices)
                else:
                    self._operations.add(message.operation_id)
            elif isinstance(message, Drain) and self._status.state == "ready":
                self._status = evolve(self._status, state="draining")
            put(message)

    def deliver(self, events: StepEvents) -> None:
        """Take what the engine published, and pass it on; nothing after a final state."""
        with self._lock:
            if self._is_final:
                return
            status = self._add_earlier(events.status)
            if self._status.state == "draining" and status.state == "ready":
                # Published before the engine read its Drain.
                status = evolve(status, state="draining")
            self._status = status
            if events.info is not None:
                self._info = events.info
            for row in events.rows:
                if row.end is not None:
                    self._requests.discard(RowId(row.request_id, row.choice))
            for result in events.operations:
                self._operations.discard(result.operation_id)
        self._emit(events if status is events.status else evolve(events, status=status))

    def end_all(self, end: RowEnd, status: EngineStatus) -> None:
        """Give every outstanding request `end`, and go to the state of `status`; its totals are set here."""
        with self._lock:
            if self._is_final:
                return
            self._is_final = status.state in ("failed", "stopped")
            requests, self._requests = self._requests, set()
            operations, self._operations = self._operations, set()
            self._earlier = evolve(self._settle(len(requests), end), num_restarts=status.num_restarts)
            self._status = status = self._add_earlier(status)
        error = status.detail or f"the engine is {status.state}"
        rows = tuple(RowEvents(request_id=each.request_id, choice=each.choice, end=end) for each in sorted(requests))
        results = tuple(OperationResult(operation_id=each, error=error) for each in sorted(operations))
        self._emit(StepEvents(status=status, rows=rows, operations=results))

    def _settle(self, num_ended: int, end: RowEnd) -> EngineStatus:
        """Return the totals so far, with the outstanding requests counted as ended."""
        last = self._status
        num_failed = last.num_failed + (0 if isinstance(end, Cancelled) else num_ended)
        num_cancelled = last.num_cancelled + (num_ended if isinstance(end, Cancelled) else 0)
        num_submitted = last.num_finished + num_failed + num_cancelled
        return evolve(last, num_failed=num_failed, num_cancelled=num_cancelled, num_submitted=num_submitted)

    def _add_earlier(self, status: EngineStatus) -> EngineStatus:
        earlier = self._earlier
        if earlier is None:
            return status
        totals = {name: getattr(status, name) + getattr(earlier, name) for name in _TOTALS}
        return evolve(status, num_restarts=max(status.num_restarts, earlier.num_restarts), **totals)

    def _emit(self, events: StepEvents) -> None:
        if self._on_events is not None:
            self._on_events(events)
