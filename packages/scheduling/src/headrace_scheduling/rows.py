"""What the engine keeps per row beside the scheduler: text, clocks, and the events to publish."""

from __future__ import annotations

from logging import getLogger
from typing import TYPE_CHECKING

from attrs import define, evolve

from headrace_scheduling.events import Cancelled, Failed, Finished, GenerateStats, RowEnd, TextDelta
from headrace_scheduling.faults import log_fault
from headrace_scheduling.messages import RowEvents
from headrace_scheduling.steps import RowId
from headrace_scheduling.text import TextStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_scheduling.messages import Submit
    from headrace_scheduling.ports import TextCodec
    from headrace_scheduling.requests import GenerationRequest
    from headrace_scheduling.steps import RowTokens

_logger = getLogger(__name__)


@define
class _Record:
    request: GenerationRequest
    submitted_at: float
    deadline: float | None
    text: TextStream | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    num_cached: int = 0
    num_generated: int = 0
    sum_logprobs: float = 0.0


@define
class RowTotals:
    """Totals since the engine loaded; they only grow."""

    num_submitted: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0


class RowBook:
    """The records of all rows that have not ended, and the row events of the current step."""

    def __init__(self, codec: TextCodec, clock: Callable[[], float]) -> None:
        self._codec = codec
        self._clock = clock
        self._records: dict[RowId, _Record] = {}
        self._choices: dict[int, tuple[RowId, ...]] = {}
        self._events: dict[RowId, RowEvents] = {}
        self.totals = RowTotals()

    def __contains__(self, row_id: RowId) -> bool:
        return row_id in self._records

    @property
    def is_empty(self) -> bool:
        """Whether every row has ended."""
        return not self._records

    @property
    def ids(self) -> tuple[RowId, ...]:
        """Rows that have not ended."""
        return tuple(self._records)

    def rows_of(self, request_id: int) -> tuple[RowId, ...]:
        """Return the rows of a request that have not ended."""
        return tuple(row_id for row_id in self._choices.get(request_id, ()) if row_id in self._records)

    def expired(self) -> tuple[RowId, ...]:
        """Return the rows whose time is over."""
        deadlines = [(row_id, record.deadline) for row_id, record in self._records.items() if record.deadline]
        if not deadlines:
            return ()
        now = self._clock()
        return tuple(row_id for row_id, deadline in deadlines if now >= deadline)

    def open(self, submit: Submit) -> tuple[RowId, ...]:
        """Begin the records of a request, one row per choice."""
        request, now = submit.request, self._clock()
        deadline = None if request.timeout_s is None else now + request.timeout_s
        rows = tuple(RowId(submit.request_id, choice) for choice in range(request.options.num_choices))
        self._choices[submit.request_id] = rows
        for row_id in rows:
            self._records[row_id] = _Record(request, now, deadline)
        self.totals.num_submitted += len(rows)
        return rows

    def admit(self, row_id: RowId, num_cached: int) -> bool:
        """Note that a row got its slot; False if its text could not be set up, which ends it."""
        record = self._records[row_id]
        record.admitted_at = self._clock()
        record.num_cached = num_cached
        self.totals.num_cached_tokens += num_cached
        self._events[row_id] = RowEvents(request_id=row_id.request_id, choice=row_id.choice, admitted=True)
        try:
            record.text = TextStream(self._codec.new_decoder(), record.request.options.stop)
        except Exception as error:  # noqa: BLE001 - a foreign codec may raise anything; only its row ends
            self.fail_text(row_id, error)
            return False
        return True

    def take(self, gain: RowTokens) -> bool:
        """Turn a row's tokens into text; False if the row ended."""
        record = self._records[gain.row_id]
        if record.first_token_at is None:
            record.first_token_at = self._clock()
        try:
            gain, delta, stop = _advance(record, gain)
        except Exception as error:  # noqa: BLE001 - a foreign decoder may raise anything; only its row ends
            self.fail_text(gain.row_id, error)
            return False
        record.num_generated += gain.num_sampled
        self.totals.num_generated_tokens += gain.num_sampled
        record.sum_logprobs += sum(entry.logprob for entry in gain.logprobs)
        reason = gain.finish_reason
        if delta is not None and (gain.logprobs or gain.row_id.choice):
            delta = evolve(delta, logprobs=gain.logprobs[: len(delta.token_ids)], choice=gain.row_id.choice)
        if gain.prompt_logprobs:
            self._add_prompt(gain)
        if reason is None:
            self._add(gain.row_id, delta, None)
            return True
        captures = record.request.options.sampling.logprobs is not None
        end = Finished(
            reason=reason,
            stats=self._stats(record),
            stop_string=stop,
            cumulative_logprob=record.sum_logprobs if captures else None,
        )
        self._close(gain.row_id, delta, end)
        return False

    def end(self, row_id: RowId, end: RowEnd) -> None:
        """End a row from outside: cancelled or failed."""
        self._close(row_id, None, end)

    def fail_text(self, row_id: RowId, error: Exception) -> None:
        """End a row whose text could not be made."""
        log_fault(_logger, f"request {row_id.request_id} failed while its text was made", error)
        message = f"the text of this request could not be made ({type(error).__name__}); see the server's log"
        self._close(row_id, None, Failed(code="request_failed", message=message))

    def drain_events(self) -> tuple[RowEvents, ...]:
        """Return and forget the events since the last call."""
        events = tuple(self._events.values())
        self._events = {}
        return events

    def _close(self, row_id: RowId, delta: TextDelta | None, end: RowEnd) -> None:
        del self._records[row_id]
        if not self.rows_of(row_id.request_id):
            del self._choices[row_id.request_id]
        if isinstance(end, Finished):
            self.totals.num_finished += 1
        elif isinstance(end, Cancelled):
            self.totals.num_cancelled += 1
        else:
            self.totals.num_failed += 1
        self._add(row_id, delta, end)

    def _add(self, row_id: RowId, delta: TextDelta | None, end: RowEnd | None) -> None:
        earlier = self._events.get(row_id)
        if earlier is not None and earlier.delta is not None:
            delta = earlier.delta.joined(delta)
        if earlier is not None:
            self._events[row_id] = evolve(earlier, delta=delta, end=end)
        elif delta is not None or end is not None:
            self._events[row_id] = RowEvents(request_id=row_id.request_id, choice=row_id.choice, delta=delta, end=end)

    def _add_prompt(self, gain: RowTokens) -> None:
        row_id = gain.row_id
        earlier = self._events.get(row_id) or RowEvents(request_id=row_id.request_id, choice=row_id.choice)
        self._events[row_id] = evolve(earlier, prompt_logprobs=gain.prompt_logprobs)

    def _stats(self, record: _Record) -> GenerateStats:
        now = self._clock()
        admitted_at = now if record.admitted_at is None else record.admitted_at
        first_token_at = now if record.first_token_at is None else record.first_token_at
        return GenerateStats(
            num_prompt_tokens=len(record.request.prompt_ids),
            num_cached_tokens=record.num_cached,
            num_generated_tokens=record.num_generated,
            queue_s=admitted_at - record.submitted_at,
            prefill_s=first_token_at - admitted_at,
            decode_s=now - first_token_at,
        )


def _advance(record: _Record, gain: RowTokens) -> tuple[RowTokens, TextDelta | None, str | None]:
    """Turn tokens into text; also return the gain up to the token that completed a stop string, and that string."""
    text = record.text
    assert text is not None, "a row gains tokens only after it was admitted"
    delta: TextDelta | None = None
    # Several at a time only where no token can end the text: what follows a stop string is not delivered.
    pieces = [(token_id,) for token_id in gain.token_ids] if text.has_stops else [gain.token_ids]
    for count, piece in enumerate(pieces, 1):
        if piece:
            delta = text.push(piece) if delta is None else delta.joined(text.push(piece))
        if text.matched_stop is not None:
            return _cut(gain, count), delta, text.matched_stop
    if gain.finish_reason is not None:
        delta = text.flush() if delta is None else delta.joined(text.flush())
        if text.matched_stop is not None:
            gain = evolve(gain, finish_reason="stop")
    return gain, delta, text.matched_stop


def _cut(gain: RowTokens, count: int) -> RowTokens:
    return evolve(
        gain,
        token_ids=gain.token_ids[:count],
        num_sampled=count,
        logprobs=gain.logprobs[:count],
        finish_reason="stop",
    )
