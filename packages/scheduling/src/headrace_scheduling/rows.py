"""What the engine keeps per request beside the scheduler: text, clocks, and the events to publish."""

from __future__ import annotations

from logging import getLogger
from typing import TYPE_CHECKING

from attrs import define

from headrace_scheduling.events import Cancelled, Failed, Finished, FinishReason, GenerateStats, RowEnd, TextDelta
from headrace_scheduling.faults import log_fault
from headrace_scheduling.messages import RowEvents
from headrace_scheduling.text import TextStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_scheduling.messages import Submit
    from headrace_scheduling.ports import TextCodec
    from headrace_scheduling.scheduler import RowTokens

_logger = getLogger(__name__)


@define
class _Record:
    submit: Submit
    submitted_at: float
    text: TextStream | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    num_generated: int = 0


@define
class RowTotals:
    """Totals since the engine loaded; they only grow."""

    num_submitted: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_generated_tokens: int = 0


class RowBook:
    """The records of all requests that have not ended, and the row events of the current step."""

    def __init__(self, codec: TextCodec, clock: Callable[[], float]) -> None:
        self._codec = codec
        self._clock = clock
        self._records: dict[int, _Record] = {}
        self._events: dict[int, RowEvents] = {}
        self.totals = RowTotals()

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._records

    @property
    def is_empty(self) -> bool:
        """Whether every request has ended."""
        return not self._records

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the requests that have not ended."""
        return tuple(self._records)

    def open(self, submit: Submit) -> None:
        """Begin the record of a request."""
        self._records[submit.request_id] = _Record(submit, self._clock())
        self.totals.num_submitted += 1

    def admit(self, request_id: int) -> bool:
        """Note that a row got its slot; False if its text could not be set up, which ends it."""
        record = self._records[request_id]
        record.admitted_at = self._clock()
        self._events[request_id] = RowEvents(request_id=request_id, admitted=True)
        try:
            record.text = TextStream(self._codec.new_decoder(), record.submit.request.options.stop)
        except Exception as error:  # noqa: BLE001 - a foreign codec may raise anything; only its row ends
            self._end_by_fault(request_id, error)
            return False
        return True

    def take(self, gain: RowTokens) -> bool:
        """Turn a row's tokens into text; False if the row ended."""
        record = self._records[gain.request_id]
        if record.first_token_at is None:
            record.first_token_at = self._clock()
        record.num_generated += gain.num_sampled
        self.totals.num_generated_tokens += gain.num_sampled
        try:
            delta, reason, stop = _advance(record, gain)
        except Exception as error:  # noqa: BLE001 - a foreign decoder may raise anything; only its row ends
            self._end_by_fault(gain.request_id, error)
            return False
        if reason is None:
            self._add(gain.request_id, delta, None)
            return True
        end = Finished(reason=reason, stats=self._stats(record), stop_string=stop)
        self._close(gain.request_id, delta, end)
        return False

    def end(self, request_id: int, end: RowEnd) -> None:
        """End a request from outside: cancelled or failed."""
        self._close(request_id, None, end)

    def drain_events(self) -> tuple[RowEvents, ...]:
        """Return and forget the events since the last call."""
        events = tuple(self._events.values())
        self._events = {}
        return events

    def _end_by_fault(self, request_id: int, error: Exception) -> None:
        log_fault(_logger, f"request {request_id} failed while its text was made", error)
        message = f"the text of this request could not be made ({type(error).__name__}); see the server's log"
        self._close(request_id, None, Failed(code="request_failed", message=message))

    def _close(self, request_id: int, delta: TextDelta | None, end: RowEnd) -> None:
        del self._records[request_id]
        if isinstance(end, Finished):
            self.totals.num_finished += 1
        elif isinstance(end, Cancelled):
            self.totals.num_cancelled += 1
        else:
            self.totals.num_failed += 1
        self._add(request_id, delta, end)

    def _add(self, request_id: int, delta: TextDelta | None, end: RowEnd | None) -> None:
        earlier = self._events.get(request_id)
        if earlier is not None and earlier.delta is not None:
            delta = _join(earlier.delta, delta)
        admitted = earlier is not None and earlier.admitted
        if admitted or delta is not None or end is not None:
            self._events[request_id] = RowEvents(request_id=request_id, admitted=admitted, delta=delta, end=end)

    def _stats(self, record: _Record) -> GenerateStats:
        now = self._clock()
        admitted_at = now if record.admitted_at is None else record.admitted_at
        first_token_at = now if record.first_token_at is None else record.first_token_at
        return GenerateStats(
            num_prompt_tokens=len(record.submit.request.prompt_ids),
            num_cached_tokens=0,
            num_generated_tokens=record.num_generated,
            queue_s=admitted_at - record.submitted_at,
            prefill_s=first_token_at - admitted_at,
            decode_s=now - first_token_at,
        )


def _join(first: TextDelta, second: TextDelta | None) -> TextDelta:
    if second is None:
        return first
    return TextDelta(first.text + second.text, first.token_ids + second.token_ids)


def _advance(record: _Record, gain: RowTokens) -> tuple[TextDelta | None, FinishReason | None, str | None]:
    text = record.text
    assert text is not None, "a row gains tokens only after it was admitted"
    delta = text.push(gain.token_ids) if gain.token_ids else None
    reason = gain.finish_reason
    if reason is not None and text.matched_stop is None:
        rest = text.flush()
        delta = rest if delta is None else _join(delta, rest)
    if text.matched_stop is not None:
        reason = "stop"
    return delta, reason, text.matched_stop
