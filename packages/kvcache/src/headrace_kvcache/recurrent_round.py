"""A round of speculation over rows of recurrent layers: the slots stay as they were until it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx

from headrace_kvcache.errors import RoundRefusedError
from headrace_kvcache.joined_replay import join_replays
from headrace_kvcache.replay import kept_steps
from headrace_kvcache.rounds import RoundBooks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_kvcache.joined_replay import JoinedReplay
    from headrace_kvcache.recurrent_views import Picked, RecurrentStep, RecurrentView
    from headrace_kvcache.replay import Kept

# Views never know their list: a cycle would keep a step's arrays until the next garbage collection.
Viewed: TypeAlias = "tuple[RecurrentStep, list[RecurrentView]]"


class RecurrentRound:
    """The open round of a batch: what its steps stored, which reaches the slots when the round ends.

    So beginning copies nothing, and what a rollback goes back to lies in the slots.

    Attributes:
        books: which rows take part, and where they stood.
        is_told: whether all layers told how to replay all steps.
        picked: where they lie and which had nothing when it began; None until its first step.
    """

    __slots__ = ("_slots", "_steps", "_viewed", "books", "is_told", "picked")

    def __init__(self) -> None:
        self.books = RoundBooks()
        self._clear()

    def _clear(self) -> None:
        self._slots: tuple[int, ...] = ()
        self.picked: Picked | None = None
        self._viewed: Viewed | None = None
        # Of each step how many positions each row has, and what its layers told.
        self._steps: list[tuple[tuple[int, ...], list[JoinedReplay]]] = []
        self.is_told = True

    def begin(self, starts: dict[int, int]) -> None:
        """Open a round of rows that stand at `starts`."""
        self.books.begin(starts)
        self._slots = tuple(starts)

    def close(self) -> None:
        """End the round and drop what its steps stored."""
        self.books.close()
        self._clear()

    def forget(self, slot: int) -> None:
        """Take a row that leaves out of the round."""
        self.books.forget(slot)
        if not self.books.is_open:
            self._clear()

    def holds(self, slots: Sequence[int]) -> bool:
        """Return whether a step of these rows belongs to the round.

        Raises:
            RoundRefusedError: only some of them take part, or some that took part have left.
        """
        if not set(slots) & set(self.books.slots):
            return False
        # A slot that was left may hold another row by now, which is not in the books.
        if tuple(slots) != self._slots or len(self.books.slots) != len(self._slots):
            raise RoundRefusedError(
                f"a step of slots {tuple(slots)} cannot be taken in a round of {self._slots}, of which "
                f"{self.books.slots} are left: step all of its rows and no others, or end it first"
            )
        return True

    def stored(self, layer: int) -> dict[int, mx.array]:
        """Return what the last step stored for a layer, `(B, ...)` by index."""
        return {} if self._viewed is None else dict(self._viewed[1][layer].stored)

    @property
    def arrays(self) -> list[mx.array]:
        """What the last step stored, of all layers."""
        return [] if self._viewed is None else [array for view in self._viewed[1] for array in view.stored.values()]

    def keep(self, viewed: Viewed) -> None:
        """Add a step; what can be prepared for its replay is, as it costs less here than after the forward."""
        step, views = viewed
        told = [view.recorded for view in views if view.recorded is not None]
        self._viewed = viewed
        self._steps.append((step.counts, join_replays(told)))
        self.is_told = self.is_told and len(told) == len(views)
        if self.picked is None:
            self.picked = step.picked

    def kept_steps(self, targets: dict[int, int]) -> list[tuple[list[JoinedReplay], Kept]]:
        """Return the steps of which something stays at the ends `targets` of the rows that have not left."""
        starts = self.books.started()
        return kept_steps(self._steps, [targets[slot] - starts[slot] if slot in starts else 0 for slot in self._slots])

    def left(self) -> mx.array | None:
        """Return which rows of the round's arrays have not left it, `(B,) int32`; None for all."""
        if len(self.books.slots) == len(self._slots):
            return None
        return mx.array([self._slots.index(slot) for slot in self.books.slots], mx.int32)
