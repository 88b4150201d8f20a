"""A budget of bytes for the caches of all rows. Pure bookkeeping, free of arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from headrace_kvcache.errors import BudgetExceeded, IntegrityError, InvalidLength
from headrace_kvcache.spec import CacheSpec, check_num_tokens, kv_bytes_at

if TYPE_CHECKING:
    from types import TracebackType

    from headrace_kvcache.scheme import KVScheme


def batch_row_kv_bytes(spec: CacheSpec, num_prompt_tokens: int, max_tokens: int, scheme: KVScheme | None = None) -> int:
    """Return the most bytes that one row's caches will hold at rest.

    Args:
        spec: the model's caches.
        num_prompt_tokens: length of the prompt.
        max_tokens: most tokens that will be generated.
        scheme: how they are stored; None for unquantized.

    Raises:
        InvalidLength: a negative number, or not an integer.
    """
    check_num_tokens("num_prompt_tokens", num_prompt_tokens)
    check_num_tokens("max_tokens", max_tokens)
    num_tokens = num_prompt_tokens + max_tokens
    return kv_bytes_at(spec, num_tokens) if scheme is None else scheme.bytes_at(spec, num_tokens)


class Reservation:
    """Bytes of a budget that one holder has, until it is closed; a context manager.

    Attributes:
        num_bytes: bytes held now, 0 once closed.
        ceiling_bytes: the most that it may be extended to with a claim to be next.
    """

    __slots__ = ("_budget", "ceiling_bytes", "num_bytes")

    def __init__(self, budget: KVBudget, num_bytes: int, ceiling_bytes: int) -> None:
        self._budget: KVBudget | None = budget
        self.num_bytes = num_bytes
        self.ceiling_bytes = ceiling_bytes

    def extend(self, num_bytes: int) -> None:
        """Hold `num_bytes` in all, at least as many as now.

        Raises:
            BudgetExceeded: they do not fit now; the reservation is unchanged and may try again later.
            InvalidLength: fewer bytes than now, or the reservation is closed.
        """
        if self._budget is None:
            raise InvalidLength("the reservation is closed; reserve() a new one")
        self._budget._extend(self, num_bytes)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    @property
    def is_open(self) -> bool:
        """Whether the bytes are still held."""
        return self._budget is not None

    def close(self) -> None:
        """Give the bytes back; closing again does nothing."""
        budget, self._budget = self._budget, None
        if budget is not None:
            budget._release(self)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            self.num_bytes = 0

    release = close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class KVBudget:
    """Bytes that the caches of all rows may take together.

    A row that does not fit now waits; one that can never fit is refused. The oldest reservation can always grow to
    its ceiling, and once it is closed the next one can, and so on: nothing that is admitted locks up.

    Args:
        total_bytes: bytes to hand out.

    Raises:
        InvalidLength: a negative number, or not an integer.
    """

    def __init__(self, total_bytes: int) -> None:
        check_num_tokens("total_bytes", total_bytes)
        self._total_bytes = total_bytes
        self._used_bytes = 0
        self._open: dict[int, Reservation] = {}

    @property
    def total_bytes(self) -> int:
        """Bytes that the budget hands out."""
        return self._total_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes held by open reservations."""
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody holds; some of them may be kept for older reservations to grow."""
        return self._total_bytes - self._used_bytes

    @property
    def num_reservations(self) -> int:
        """Open reservations."""
        return len(self._open)

    def refuse(self, ceiling_bytes: int) -> None:
        """Refuse what can never fit, even alone: call it before a row is queued.

        Raises:
            BudgetExceeded: with `can_wait` False.
            InvalidLength: a negative number, or not an integer.
        """
        check_num_tokens("ceiling_bytes", ceiling_bytes)
        if ceiling_bytes > self._total_bytes:
            raise BudgetExceeded(ceiling_bytes, self._total_bytes, can_wait=False)

    def fits(self, num_bytes: int, *, ceiling_bytes: int | None = None) -> bool:
        """Return whether `reserve` would succeed now."""
        ceiling_bytes = num_bytes if ceiling_bytes is None else ceiling_bytes
        return max(num_bytes, ceiling_bytes) <= self._total_bytes and num_bytes <= self._spare_bytes()

    def reserve(self, num_bytes: int, *, ceiling_bytes: int | None = None) -> Reservation:
        """Hold bytes for a row, or for the transient of a prefill.

        Args:
            num_bytes: bytes to hold now.
            ceiling_bytes: the most that the row may ever need; by default what it holds now.

        Raises:
            BudgetExceeded: they do not fit now (`can_wait`), or the ceiling can never fit; nothing is held.
            InvalidLength: a negative number, not an integer, or a ceiling below what is held.
        """
        check_num_tokens("num_bytes", num_bytes)
        ceiling_bytes = num_bytes if ceiling_bytes is None else ceiling_bytes
        check_num_tokens("ceiling_bytes", ceiling_bytes)
        if ceiling_bytes < num_bytes:
            raise InvalidLength(f"ceiling_bytes is {ceiling_bytes}; it must be at least num_bytes, {num_bytes}")
        self.refuse(ceiling_bytes)
        spare = self._spare_bytes()
        if num_bytes > spare:
            raise BudgetExceeded(num_bytes, spare, can_wait=True)
        reservation = Reservation(self, num_bytes, ceiling_bytes)
        self._open[id(reservation)] = reservation
        self._used_bytes += num_bytes
        return reservation

    def check_integrity(self) -> None:
        """Check the sum of the reservations against the bytes used.

        Raises:
            IntegrityError: they differ, or more is used than there is.
        """
        held = sum(reservation.num_bytes for reservation in self._open.values())
        if held != self._used_bytes or held > self._total_bytes:
            raise IntegrityError(
                f"{len(self._open)} reservations hold {held} bytes, the budget of {self._total_bytes} counts "
                f"{self._used_bytes}"
            )

    def _spare_bytes(self, *, asking: Reservation | None = None) -> int:
        """Return what may be handed out without taking from an older reservation's way to its ceiling.

        Everything younger may still be held when a reservation comes to its ceiling, everything older is gone.
        """
        spare, younger = self.free_bytes, 0
        is_older = asking is None
        for reservation in reversed(self._open.values()):
            if is_older:
                spare = min(spare, self._total_bytes - reservation.ceiling_bytes - younger)
            is_older = is_older or reservation is asking
            younger += reservation.num_bytes
        return max(0, spare)

    def _extend(self, reservation: Reservation, num_bytes: int) -> None:
        check_num_tokens("num_bytes", num_bytes)
        more = num_bytes - reservation.num_bytes
        if more < 0:
            raise InvalidLength(f"num_bytes is {num_bytes}; a reservation of {reservation.num_bytes} can only grow")
        self.refuse(num_bytes)
        spare = self._spare_bytes(asking=reservation)
        if more > spare:
            raise BudgetExceeded(more, spare, can_wait=True)
        reservation.num_bytes = num_bytes
        # Beyond its ceiling a reservation has no claim, so that the ceiling follows and stays reachable.
        reservation.ceiling_bytes = max(reservation.ceiling_bytes, num_bytes)
        self._used_bytes += more

    def _release(self, reservation: Reservation) -> None:
        del self._open[id(reservation)]
        self._used_bytes -= reservation.num_bytes
