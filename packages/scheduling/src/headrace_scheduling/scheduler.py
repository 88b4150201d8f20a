"""Which rows run in the next step: decisions over ids and counts only, no arrays and no text.

A row goes waiting -> prefill (slices of its prompt) -> decode -> finished. The scheduler may be asked for step n+1
before step n's tokens are known; results of rows that have ended since are dropped.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING

from attrs import define, field, frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_sampling import SamplingParams
    from headrace_scheduling.events import FinishReason


@frozen(kw_only=True)
class RowOpening:
    """A row's sampling and what it looks at: the whole prompt, and the tokens that end the row."""

    sampling: SamplingParams
    prompt_ids: tuple[int, ...]
    eos_token_ids: frozenset[int]


@frozen(kw_only=True)
class PrefillSlice:
    """The next part of a row's prompt.

    Attributes:
        token_ids: the prompt tokens of this slice, at least one.
        is_last: the slice ends the prompt, so the step samples the row's first token.
        opening: what the runner needs to seat the row, on its first slice; None on later ones.
    """

    request_id: int
    slot: int
    token_ids: tuple[int, ...]
    is_last: bool
    opening: RowOpening | None = None


@frozen
class DecodeRow:
    """A row that feeds its last sampled token, which may be unread, and samples the next."""

    request_id: int
    slot: int


@frozen
class Step:
    """One step: slices in admission order, decode rows in ascending order of slot."""

    prefills: tuple[PrefillSlice, ...]
    decodes: tuple[DecodeRow, ...]


@frozen
class StepResult:
    """The tokens that one step sampled: request id -> a list, because a later issue accepts several a step."""

    tokens: Mapping[int, tuple[int, ...]]


@frozen(kw_only=True)
class RowTokens:
    """What one row gained in a step.

    Attributes:
        token_ids: tokens to deliver; a final EOS is left out.
        num_sampled: tokens that count as generated, a final EOS included.
        finish_reason: set when the row ended by EOS or by its limit; the row has left the scheduler.
    """

    request_id: int
    token_ids: tuple[int, ...]
    num_sampled: int
    finish_reason: FinishReason | None = None


@frozen(kw_only=True)
class RowSpec:
    """What the scheduler knows of a request.

    Attributes:
        max_tokens: most tokens to sample; prompt and reply together fit the context.
        eos_token_ids: tokens that end the row; empty to ignore them.
        serial: the row runs only while no other does.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    serial: bool = False


@define
class _Row:
    spec: RowSpec
    slot: int
    num_prefilled: int = 0
    num_dispatched: int = 0
    num_sampled: int = 0

    @property
    def can_decode(self) -> bool:
        return 0 < self.num_dispatched < self.spec.max_tokens


@define
class BatchScheduler:
    """Admits rows in order of arrival and plans steps. Not thread-safe: it belongs to the engine's thread.

    Attributes:
        max_rows: most rows that run at once.
        max_context: most positions of a row.
        prefill_chunk: most prompt tokens of one slice.
        prefill_pack: further prompts join a step's prefill while rows times the longest slice stay within this number
            of positions, so that a burst of short prompts does not cost one step each.
        hold: while true nothing is admitted; running rows go on.
    """

    max_rows: int
    max_context: int
    prefill_chunk: int = field(default=512, kw_only=True)
    prefill_pack: int = field(default=128, kw_only=True)
    hold: bool = field(default=False, init=False)
    _waiting: deque[RowSpec] = field(factory=deque, init=False)
    _rows: dict[int, _Row] = field(factory=dict, init=False)
    _free_slots: list[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        for name in ("max_rows", "max_context", "prefill_chunk"):
            value: int = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value!r}; it must be at least 1")
        self._free_slots = list(range(self.max_rows))

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running_ids(self) -> tuple[int, ...]:
        """Ids of the rows that hold a slot, in order of admission."""
        return tuple(self._rows)

    @property
    def waiting_ids(self) -> tuple[int, ...]:
        """Ids of the requests that wait, in order."""
        return tuple(spec.request_id for spec in self._waiting)

    def submit(self, spec: RowSpec) -> None:
        """Queue a request.

        Raises:
            ValueError: an empty prompt, no room for a token, or more positions than the context.
        """
        num_positions = len(spec.prompt_ids) + spec.max_tokens
        if not spec.prompt_ids or spec.max_tokens < 1 or num_positions > self.max_context:
            raise ValueError(
                f"a prompt of {len(spec.prompt_ids)} tokens with max_tokens={spec.max_tokens!r} does not fit; "
                f"both must be at least 1 and together at most {self.max_context}: place the request first"
            )
        self._waiting.append(spec)

    def remove(self, request_id: int) -> int | None:
        """Forget a request wherever it is, and return the slot that it held, if any."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            heapq.heappush(self._free_slots, row.slot)
            return row.slot
        self._waiting = deque(spec for spec in self._waiting if spec.request_id != request_id)
        return None

    def schedule(self) -> Step | None:
        """Plan the next step, admitting what fits; None when no row can do anything before results are applied."""
        decodes = tuple(
            DecodeRow(row.spec.request_id, row.slot)
            for row in sorted(self._rows.values(), key=_slot_of)
            if row.can_decode
        )
        prefills = self._schedule_prefills()
        for decode in decodes:
            self._rows[decode.request_id].num_dispatched += 1
        return Step(prefills, decodes) if prefills or decodes else None

    def apply(self, result: StepResult) -> list[RowTokens]:
        """Count a step's tokens; rows that reached EOS or their limit are marked, and removed by the caller."""
        gains: list[RowTokens] = []
        for request_id, token_ids in result.tokens.items():
            row = self._rows.get(request_id)
            if row is not None and row.num_sampled < row.spec.max_tokens:
                gains.append(_gain(row, token_ids))
        return gains

    def check_integrity(self) -> None:
        """Check that every slot is either free or held by one row, and that no id occurs twice.

        Raises:
            RuntimeError: naming the law that is broken.
        """
        held = [row.slot for row in self._rows.values()]
        if sorted(held + self._free_slots) != list(range(self.max_rows)):
            raise RuntimeError(f"slots held {held!r} and free {self._free_slots!r} are not 0 to {self.max_rows - 1}")
        ids = [*self._rows, *self.waiting_ids]
        if len(ids) != len(set(ids)):
            raise RuntimeError(f"a request id occurs twice in {ids!r}")
        for row in self._rows.values():
            if not row.num_sampled <= row.num_dispatched <= row.spec.max_tokens:
                raise RuntimeError(f"request {row.spec.request_id} was scheduled beyond its limit")

    def _schedule_prefills(self) -> tuple[PrefillSlice, ...]:
        slices: list[PrefillSlice] = []
        for row in list(self._rows.values()):
            if row.num_dispatched == 0 and self._has_room(slices, row.spec, row.num_prefilled):
                slices.append(self._next_slice(row))
        while self._can_admit() and self._has_room(slices, self._waiting[0], 0):
            slices.append(self._next_slice(self._admit()))
        return tuple(slices)

    def _has_room(self, slices: list[PrefillSlice], spec: RowSpec, num_prefilled: int) -> bool:
        if not slices:
            return True
        longest = max(len(spec.prompt_ids) - num_prefilled, *(len(part.token_ids) for part in slices))
        return (len(slices) + 1) * longest <= min(self.prefill_pack, self.prefill_chunk)

    def _can_admit(self) -> bool:
        if self.hold or not self._waiting or not self._free_slots:
            return False
        if not self._rows:
            return True
        return not self._waiting[0].serial and not any(row.spec.serial for row in self._rows.values())

    def _admit(self) -> _Row:
        spec = self._waiting.popleft()
        row = self._rows[spec.request_id] = _Row(spec, heapq.heappop(self._free_slots))
        return row

    def _next_slice(self, row: _Row) -> PrefillSlice:
        begin = row.num_prefilled
        row.num_prefilled = min(begin + self.prefill_chunk, len(row.spec.prompt_ids))
        is_last = row.num_prefilled == len(row.spec.prompt_ids)
        row.num_dispatched = int(is_last)
        return PrefillSlice(
            request_id=row.spec.request_id,
            slot=row.slot,
            token_ids=row.spec.prompt_ids[begin : row.num_prefilled],
            is_last=is_last,
            opening=_opening_of(row.spec) if begin == 0 else None,
        )


def _slot_of(row: _Row) -> int:
    return row.slot


def _opening_of(spec: RowSpec) -> RowOpening:
    return RowOpening(sampling=spec.sampling, prompt_ids=spec.prompt_ids, eos_token_ids=spec.eos_token_ids)


def _gain(row: _Row, token_ids: tuple[int, ...]) -> RowTokens:
    spec = row.spec
    taken = token_ids[: spec.max_tokens - row.num_sampled]
    for index, token_id in enumerate(taken):
        if token_id in spec.eos_token_ids:
            row.num_sampled += index + 1
            return RowTokens(
                request_id=spec.request_id, token_ids=taken[:index], num_sampled=index + 1, finish_reason="stop"
            )
    row.num_sampled += len(taken)
    reason: FinishReason | None = "length" if row.num_sampled >= spec.max_tokens else None
    return RowTokens(request_id=spec.request_id, token_ids=taken, num_sampled=len(taken), finish_reason=reason)
