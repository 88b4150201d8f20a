"""Bytes of the slots that rows hold, by capacity class, and which row may grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from headrace_kvcache import BudgetExceeded, CapacityClasses, KVBudget

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_kvcache import Reservation
    from headrace_scheduling.steps import RowId

# A row without a limit reserves room for so many tokens beside its prompt, and grows class by class (rulings K-33a).
EXPECTED_REPLY = 1024


@define(eq=False)
class _Held:
    reservation: Reservation
    capacity: int


@define
class SlotBudget:
    """Charges rows the capacity of their slots. The oldest row can always grow to its end, so one always finishes.

    Attributes:
        budget: the bytes of all rows together.
        bytes_at: bytes of a slot for so many positions.
        classes: capacities of slots.
    """

    budget: KVBudget
    bytes_at: Callable[[int], int]
    classes: CapacityClasses = field(factory=CapacityClasses)
    _held: dict[RowId, _Held] = field(factory=dict, init=False)

    @property
    def used_bytes(self) -> int:
        """Bytes held by rows."""
        return self.budget.used_bytes

    @property
    def least_bytes(self) -> int:
        """Bytes of the smallest slot."""
        return self._cost(1)

    @property
    def holders(self) -> set[RowId]:
        """Rows that hold bytes."""
        return set(self._held)

    def refuse(self, num_tokens: int) -> None:
        """Refuse a row that could reach `num_tokens` positions and never fits.

        Raises:
            BudgetExceeded: it does not fit even alone.
        """
        self.budget.refuse(self._cost(num_tokens))

    def largest_context(self, limit: int) -> int:
        """Return the most positions that a row alone may reach, at most `limit`; 0 if none."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self._cost(middle) <= self.budget.total_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    def reserve(self, row_id: RowId, num_prompt_tokens: int, max_tokens: int) -> bool:
        """Hold the slot of a new row; False if it does not fit now.

        Raises:
            BudgetExceeded: it can never fit.
        """
        ceiling = num_prompt_tokens + max_tokens
        expected = min(num_prompt_tokens + EXPECTED_REPLY, ceiling)
        try:
            reservation = self.budget.reserve(self._cost(expected), ceiling_bytes=self._cost(ceiling))
        except BudgetExceeded as error:
            if not error.can_wait:
                raise
            return False
        self._held[row_id] = _Held(reservation, self.classes.capacity_for(expected))
        return True

    def grow(self, row_id: RowId, num_tokens: int) -> bool:
        """Make sure that a row may hold `num_tokens` positions; False if it has to wait for another row to end."""
        held = self._held[row_id]
        if num_tokens <= held.capacity:
            return True
        try:
            held.reservation.extend(self._cost(num_tokens))
        except BudgetExceeded:
            return False
        held.capacity = self.classes.capacity_for(num_tokens)
        return True

    def release(self, row_id: RowId) -> None:
        """Give a row's bytes back; nothing if it holds none."""
        held = self._held.pop(row_id, None)
        if held is not None:
            held.reservation.close()

    def check_integrity(self) -> None:
        """Check the books, see `KVBudget.check_integrity`."""
        self.budget.check_integrity()

    def _cost(self, num_tokens: int) -> int:
        return self.bytes_at(self.classes.capacity_for(num_tokens))
