"""A step runner in plain Python that checks what the engine asks of it."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING

from headrace_scheduling.scheduler import Step, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def repeat_prompt(history: Sequence[int], num_prompt_tokens: int) -> int:
    """Choose the next token: the prompt's tokens again and again."""
    return history[(len(history) - num_prompt_tokens) % num_prompt_tokens]


class FakeStepRunner:
    """Each row's next token is a pure function of its whole history, so any mix-up of rows changes tokens.

    Args:
        next_token: from a row's tokens so far and the length of its prompt.
        failing_dispatches: numbers of the dispatches, counted from 0, that raise.
        failing_collects: the same for collects.
        exit_token: a token that ends the whole process at once when it is first in a prompt, as a crash would.
        on_step: called with every dispatched step.

    Attributes:
        num_resets: how often `reset` was called.
    """

    def __init__(
        self,
        *,
        next_token: Callable[[Sequence[int], int], int] = repeat_prompt,
        failing_dispatches: frozenset[int] = frozenset(),
        failing_collects: frozenset[int] = frozenset(),
        exit_token: int | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        self._next_token = next_token
        self._failing_dispatches = failing_dispatches
        self._failing_collects = failing_collects
        self._exit_token = exit_token
        self._on_step = on_step
        self._num_dispatches = 0
        self._num_collects = 0
        self._slots: dict[int, tuple[int, list[int], int]] = {}
        self._in_flight: deque[dict[int, tuple[int, ...]]] = deque()
        self.num_resets = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_slots(self) -> int:
        """How many slots are in use."""
        return len(self._slots)

    @property
    def kv_bytes(self) -> int:
        return sum(len(history) for _, history, _ in self._slots.values())

    def dispatch(self, step: Step) -> None:
        number, self._num_dispatches = self._num_dispatches, self._num_dispatches + 1
        if self.num_in_flight >= 2:
            raise RuntimeError("three steps are in flight; at most two may be")
        if self._on_step is not None:
            self._on_step(step)
        self._maybe_exit(step)
        if number in self._failing_dispatches:
            raise ArithmeticError(f"dispatch {number} fails as told")
        tokens: dict[int, tuple[int, ...]] = {}
        self._decode(step, tokens)
        self._prefill(step, tokens)
        self._in_flight.append(tokens)

    def collect(self) -> StepResult:
        number, self._num_collects = self._num_collects, self._num_collects + 1
        tokens = self._in_flight.popleft()
        if number in self._failing_collects:
            raise ArithmeticError(f"collect {number} fails as told")
        return StepResult(tokens)

    def release(self, slot: int) -> None:
        del self._slots[slot]

    def reset(self) -> None:
        self.num_resets += 1
        self._slots.clear()
        self._in_flight.clear()

    def _prefill(self, step: Step, tokens: dict[int, tuple[int, ...]]) -> None:
        for part in step.prefills:
            if part.opening is not None:
                if part.slot in self._slots:
                    raise RuntimeError(f"slot {part.slot} is taken")
                self._slots[part.slot] = (part.request_id, [], 0)
            _, history, num_prompt_tokens = self._slots[part.slot]
            history.extend(part.token_ids)
            num_prompt_tokens += len(part.token_ids)
            self._slots[part.slot] = (part.request_id, history, num_prompt_tokens)
            if part.is_last:
                tokens[part.request_id] = self._sample(part.slot)

    def _decode(self, step: Step, tokens: dict[int, tuple[int, ...]]) -> None:
        slots = [row.slot for row in step.decodes]
        if slots != sorted(set(slots)):
            raise RuntimeError(f"decode slots {slots!r} are not ascending")
        for row in step.decodes:
            if self._slots[row.slot][0] != row.request_id:
                raise RuntimeError(f"slot {row.slot} does not belong to request {row.request_id}")
            tokens[row.request_id] = self._sample(row.slot)

    def _sample(self, slot: int) -> tuple[int, ...]:
        _, history, num_prompt_tokens = self._slots[slot]
        history.append(self._next_token(history, num_prompt_tokens))
        return (history[-1],)

    def _maybe_exit(self, step: Step) -> None:
        if self._exit_token is not None and any(part.token_ids[0] == self._exit_token for part in step.prefills):
            os._exit(9)
