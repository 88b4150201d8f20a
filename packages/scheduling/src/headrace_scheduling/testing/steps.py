"""A step runner in plain Python that checks what the engine asks of it."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, cast

from attrs import define

from headrace_scheduling.steps import CacheTraits, KnownRun, RowId, RowOpening, SharedPrefix, Snapshot, Step, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def repeat_prompt(history: Sequence[int], num_prompt_tokens: int) -> int:
    """Choose the next token: the prompt's tokens again and again."""
    return history[(len(history) - num_prompt_tokens) % num_prompt_tokens]


@define
class _Slot:
    """A row's tokens, of which the first `num_fed` are in its caches."""

    history: list[int]
    num_fed: int
    num_prompt: int
    is_converted: bool


class FakeStepRunner:
    """Each row's next token is a pure function of its whole history, so any mix-up of rows changes tokens.

    A copied prefix is the tokens that a slot holds, so that a wrong one changes tokens too.

    Args:
        next_token: from a row's tokens so far and the length of its prompt.
        is_forced: from the same, whether a grammar would leave that token alone open.
        failing_dispatches: numbers of the dispatches, counted from 0, that raise.
        failing_collects: the same for collects.
        failing_seats: the same for rows that are seated.
        failing_copies: the same for copies of prefixes.
        exit_token: a token that ends the whole process at once when it is first in a prompt, as a crash would.
        on_step: called with every dispatched step.
        can_trim: whether a prefix shorter than what a row holds may be copied.
        first_chunk: as in `CacheTraits`.
        serial_reasons: codes of what forbids that rows share steps.
        bytes_per_token: what a slot costs.

    Attributes:
        num_resets: how often `reset` was called.
        num_computed: prompt tokens that were computed, per row.
    """

    def __init__(
        self,
        *,
        next_token: Callable[[Sequence[int], int], int] = repeat_prompt,
        is_forced: Callable[[Sequence[int], int], bool] | None = None,
        failing_dispatches: frozenset[int] = frozenset(),
        failing_collects: frozenset[int] = frozenset(),
        failing_seats: frozenset[int] = frozenset(),
        failing_copies: frozenset[int] = frozenset(),
        exit_token: int | None = None,
        on_step: Callable[[Step], None] | None = None,
        can_trim: bool = True,
        first_chunk: Callable[[int, int | None], int] | None = None,
        serial_reasons: tuple[str, ...] = (),
        bytes_per_token: int = 1,
    ) -> None:
        self._next_token = next_token
        self._is_forced = is_forced
        self._faults = {
            "dispatch": failing_dispatches,
            "collect": failing_collects,
            "seat": failing_seats,
            "copy": failing_copies,
        }
        self._counts = dict.fromkeys(self._faults, 0)
        self._exit_token = exit_token
        self._on_step = on_step
        self._bytes_per_token = bytes_per_token
        self._slots: dict[RowId, _Slot] = {}
        self._in_flight: deque[dict[RowId, tuple[_Slot, int, int]]] = deque()
        self.traits = CacheTraits(can_trim=can_trim, first_chunk=first_chunk)
        self.serial_reasons = serial_reasons
        self.num_resets = 0
        self.num_computed: dict[RowId, int] = {}

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_slots(self) -> int:
        """How many slots are in use."""
        return len(self._slots)

    @property
    def kv_bytes(self) -> int:
        return sum(len(slot.history) for slot in self._slots.values())

    def slot_bytes(self, num_tokens: int) -> int:
        return num_tokens * self._bytes_per_token

    def seat(self, opening: RowOpening) -> None:
        self._maybe_fail("seat")
        if opening.row_id in self._slots:
            raise RuntimeError(f"row {opening.row_id} is seated already")
        held: list[int] = [] if opening.prefix is None else list(cast("Sequence[int]", opening.prefix.caches))
        is_converted = opening.prefix is not None and opening.prefix.is_converted
        if tuple(held) != opening.prompt_ids[: len(held)]:
            raise RuntimeError(f"row {opening.row_id} begins with a prefix that is not its own")  # pyright: ignore[reportArgumentType]
        self._slots[opening.row_id] = _Slot(
            history=held,
            num_fed=len(held),
            num_prompt=len(opening.prompt_ids),
            is_converted=is_converted,
        )
        self.num_computed[opening.row_id] = 0

    def copy(self, snapshot: Snapshot) -> SharedPrefix:
        self._maybe_fail("copy")
        slot = self._slots[snapshot.row_id]
        is_cut = snapshot.first or snapshot.num_tokens != slot.num_fed
        if snapshot.num_tokens > slot.num_fed or (is_cut and not self.traits.can_trim):
            raise RuntimeError(f"{snapshot} is asked of a slot that holds {slot.num_fed} positions")
        if self.traits.first_chunk is not None and snapshot.is_converted != slot.is_converted:
            raise RuntimeError(f"{snapshot} is asked of a slot whose is_converted is {slot.is_converted}")
        return SharedPrefix(
            num_tokens=snapshot.num_tokens,
            caches=tuple(slot.history[snapshot.first : snapshot.num_tokens]),
            first=snapshot.first,
            is_converted=snapshot.is_converted,
        )

    def dispatch(self, step: Step) -> None:
        if self.num_in_flight >= 2:
            raise RuntimeError("three steps are in flight; at most two may be")
        if self._on_step is not None:
            self._on_step(step)
        self._maybe_exit(step)
        self._maybe_fail("dispatch")
        # Where in a row's history its new tokens are.
        tokens: dict[RowId, tuple[_Slot, int, int]] = {}
        for row_id in step.decodes:
            slot = self._slots[row_id]
            slot.num_fed += 1
            tokens[row_id] = self._sample(slot)
        for run in step.runs:
            tokens[run.row_id] = self._feed(run)
        for part in step.prefills:
            slot = self._slots[part.row_id]
            slot.history.extend(part.token_ids)
            slot.num_fed += len(part.token_ids)
            slot.is_converted = slot.is_converted or part.converts
            self.num_computed[part.row_id] += len(part.token_ids)
            if part.is_last:
                if slot.num_fed != slot.num_prompt:
                    raise RuntimeError(f"row {part.row_id} samples after {slot.num_fed} of {slot.num_prompt} tokens")
                tokens[part.row_id] = self._sample(slot)
        self._in_flight.append(tokens)

    def collect(self) -> StepResult:
        tokens = self._in_flight.popleft()
        self._maybe_fail("collect")
        gained = {row_id: tuple(slot.history[begin:end]) for row_id, (slot, begin, end) in tokens.items()}
        forced = {row_id: self._forced(slot, end) for row_id, (slot, _, end) in tokens.items()}
        return StepResult(gained, forced={row_id: ids for row_id, ids in forced.items() if ids})

    def release(self, row_id: RowId) -> None:
        del self._slots[row_id]

    def reset(self) -> None:
        self.num_resets += 1
        self._slots.clear()
        self._in_flight.clear()

    def _sample(self, slot: _Slot) -> tuple[_Slot, int, int]:
        slot.history.append(self._next_token(slot.history, slot.num_prompt))
        end = len(slot.history)
        return slot, end - 1, end

    def _feed(self, run: KnownRun) -> tuple[_Slot, int, int]:
        slot = self._slots[run.row_id]
        begin = len(slot.history)
        if len(run.token_ids) < 2 or slot.history[slot.num_fed :] != [run.token_ids[0]]:
            raise RuntimeError(f"{run} does not go on after {slot.history[slot.num_fed :]}")
        if self._forced(slot, begin)[: len(run.token_ids) - 1] != run.token_ids[1:]:
            raise RuntimeError(f"{run} holds tokens that are not forced")
        slot.history.extend(run.token_ids[1:])
        slot.num_fed += len(run.token_ids)
        _, _, end = self._sample(slot)
        return slot, begin, end

    def _forced(self, slot: _Slot, length: int) -> tuple[int, ...]:
        """Return what is forced after the first `length` tokens of a row, at most eight."""
        history = slot.history[:length]
        while self._is_forced is not None and len(history) < length + 8 and self._is_forced(history, slot.num_prompt):
            history.append(self._next_token(history, slot.num_prompt))
        return tuple(history[length:])

    def _maybe_fail(self, what: str) -> None:
        number = self._counts[what]
        self._counts[what] += 1
        if number in self._faults[what]:
            raise ArithmeticError(f"{what} {number} fails as told")

    def _maybe_exit(self, step: Step) -> None:
        if self._exit_token is not None and any(part.token_ids[0] == self._exit_token for part in step.prefills):
            os._exit(9)
