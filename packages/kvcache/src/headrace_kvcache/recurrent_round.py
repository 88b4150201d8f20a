"""A round of speculation over rows of recurrent layers: the slots stay as they were until it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx

from headrace_kvcache.errors import RoundRefusedError
from headrace_kvcache.replay import kept_of_steps, untold
from headrace_kvcache.rounds import RoundBooks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_kvcache.recurrent_views import Picked, RecurrentStep, RecurrentView
    from headrace_kvcache.replay import Arrays, Replay

# Views never know their list: a cycle would keep a step's arrays until the next garbage collection.
Viewed: TypeAlias = "tuple[RecurrentStep, list[RecurrentView]]"


class RecurrentRound:
    """The open round of a batch: what its steps stored, which reaches the slots when the round ends.

    So beginning copies nothing, and what a rollback goes back to lies in the slots.

    Attributes:
        books: which rows take part, and where they stood.
    """

    __slots__ = ("_picked", "_replays", "_slots", "_steps", "books")

    def __init__(self) -> None:
        self.books = RoundBooks()
        self._clear()

    def _clear(self) -> None:
        self._slots: tuple[int, ...] = ()
        self._picked: Picked | None = None
        self._steps: list[Viewed] = []
        self._replays: list[list[Replay]] = []

    def begin(self, starts: dict[int, int], picked: Picked) -> None:
        """Open a round of rows that stand at `starts` and lie where `picked` says."""
        self.books.begin(starts)
        self._slots, self._picked = tuple(starts), picked

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
        return dict(self._steps[-1][1][layer].stored) if self._steps else {}

    @property
    def arrays(self) -> list[mx.array]:
        """What the last step stored, of all layers."""
        return [array for view in self._steps[-1][1] for array in view.stored.values()] if self._steps else []

    def keep(self, viewed: Viewed) -> None:
        """Add a step."""
        self._steps.append(viewed)
        self._replays.append([view.replay for view in viewed[1] if view.replay is not None])

    def check_replayable(self) -> None:
        """Raise `RoundRefusedError` unless all layers told how to replay all steps."""
        if any(len(told) < len(views) for told, (_, views) in zip(self._replays, self._steps, strict=True)):
            raise untold()

    def replayed(self, layers: Sequence[Arrays], targets: dict[int, int]) -> list[Arrays]:
        """Return the arrays of all rows of the round as they are at the ends `targets`, per layer.

        Args:
            layers: the slots, per layer.
            targets: the ends of the rows that have not left.
        """
        assert self._picked is not None
        starts = self.books.started()
        keeps = [targets[slot] - starts[slot] if slot in targets else 0 for slot in self._slots]
        kept = kept_of_steps((step.counts for step, _ in self._steps), keeps)
        take = self._picked.take
        states = [[None if buffer is None else take(buffer) for buffer in buffers] for buffers in layers]
        for replays, share in zip(self._replays, kept, strict=True):
            if share is not None:
                states = [replay(arrays, share) for replay, arrays in zip(replays, states, strict=True)]
        return states

    def left(self) -> mx.array | None:
        """Return which rows of the round's arrays have not left it, `(B,) int32`; None for all."""
        if len(self.books.slots) == len(self._slots):
            return None
        return mx.array([self._slots.index(slot) for slot in self.books.slots], mx.int32)
