"""What a row has seen, kept on the device: only what its parameters need, and no longer than their largest window.

A row's history is two arrays at most. The *ring* holds its last tokens, the newest at the end: ids of the reply as they
are, ids of the prompt as their complement `~id`, and `EMPTY` where there is nothing yet. The *counts* hold how often
the reply has each token, for penalties without a window. Rows that step together are stacked; a row remembers its
stack and its place in it, so that membership may change at any step without a copy for those that stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import define, field, frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headrace_sampling.params import SamplingParams

EMPTY = 2**31 - 1
"""Marks a place of a ring that no token has filled."""


@frozen(kw_only=True)
class HistoryNeeds:
    """What the parameters of a row ask of its history.

    Attributes:
        ring_size: how many last tokens; 0 is none.
        counts_reply: whether occurrences in the whole reply count.
        knows_prompt: whether every token of the prompt counts, however long ago.
    """

    ring_size: int
    counts_reply: bool
    knows_prompt: bool

    @classmethod
    def of(cls, params: SamplingParams) -> HistoryNeeds:
        """Read the needs from the parameters; a penalty that is off needs nothing."""
        penalties = (
            (params.penalises_repetition, params.repetition_window),
            (params.presence_penalty != 0, params.presence_window),
            (params.frequency_penalty != 0, params.frequency_window),
        )
        windows = [window for is_on, window in penalties if is_on]
        ring_windows = [*windows, params.dry_window] if params.dry_multiplier else windows
        return cls(
            ring_size=max(ring_windows, default=0),
            counts_reply=0 in windows,
            knows_prompt=params.penalises_repetition and params.repetition_window == 0,
        )

    @property
    def is_empty(self) -> bool:
        """Whether no history is needed at all."""
        return not (self.ring_size or self.counts_reply)


class RowHistory:
    """The history of one row. Not thread-safe.

    Args:
        needs: what to keep.
        prompt: token ids of the prompt, oldest first.
    """

    __slots__ = ("_counts", "_pending", "_place", "_prompt", "_ring", "_stack", "needs")

    def __init__(self, needs: HistoryNeeds, prompt: Sequence[int] = ()) -> None:
        self.needs = needs
        recent = prompt[-needs.ring_size :] if needs.ring_size else ()
        gap = needs.ring_size - len(recent)
        self._ring = mx.array([EMPTY] * gap + [~token for token in recent], mx.int32)
        self._prompt = mx.array(sorted(set(prompt)) if needs.knows_prompt else [], mx.int32)
        self._counts: mx.array | None = None
        # Counted as soon as the size of the vocabulary is known.
        self._pending: list[mx.array] = []
        self._stack: HistoryStack | None = None
        self._place = 0

    def is_in(self, stack: HistoryStack) -> bool:
        """Whether the newest state is in this stack."""
        return self._stack is stack

    def move_to(self, stack: HistoryStack, place: int) -> None:
        """Let a stack that has taken the arrays hold the newest state from now on."""
        self._stack, self._place = stack, place

    def ring(self) -> mx.array:
        """Return the last tokens, `(ring_size,) int32`, lazily."""
        self._take_back()
        return self._ring

    def counts(self, vocab_size: int) -> mx.array:
        """Return the occurrences in the reply, `(V,) int32`, lazily."""
        self._take_back()
        counts = mx.zeros((vocab_size,), mx.int32) if self._counts is None else self._counts
        for tokens in self._pending:
            counts = counts.at[mx.minimum(tokens, vocab_size - 1)].add(tokens < vocab_size)
        self._counts, self._pending = counts, []
        return counts

    def in_prompt(self, vocab_size: int) -> mx.array:
        """Return which tokens the prompt has, `(V,) bool`, where the needs ask for it; else none."""
        seen = mx.zeros((vocab_size + 1,), mx.bool_)
        if self._prompt.size:
            seen[mx.minimum(self._prompt, vocab_size)] = mx.array(True)
        return seen[:vocab_size]

    def append(self, token_ids: Iterable[int] | mx.array) -> None:
        """Add tokens of the reply that were not sampled here, or whose sampling was not recorded.

        Args:
            token_ids: in order; an array is not read.
        """
        tokens = token_ids if isinstance(token_ids, mx.array) else mx.array(list(token_ids), mx.int32)
        tokens = tokens.astype(mx.int32).reshape(-1)
        if not tokens.size:
            return
        self._take_back()
        if self.needs.ring_size:
            self._ring = mx.concatenate([self._ring, tokens])[-self.needs.ring_size :]
        if self.needs.counts_reply:
            self._pending.append(tokens)

    def fork(self, token_ids: Sequence[int]) -> RowHistory:
        """Return another history: this one and some more tokens of the reply. This one stays as it is."""
        fork = RowHistory(self.needs)
        fork._ring, fork._prompt = self.ring(), self._prompt
        fork._counts, fork._pending = self._counts, list(self._pending)
        fork.append(token_ids)
        return fork

    def _take_back(self) -> None:
        if self._stack is not None:
            ring, counts = self._stack.row(self._place)
            if self.needs.ring_size:
                self._ring = ring[-self.needs.ring_size :]
            if self.needs.counts_reply:
                self._counts = counts
            self._stack = None


@define(eq=False)
class HistoryStack:
    """Histories of rows that step together.

    Attributes:
        rows: the rows, in the order of the arrays.
        vocab_size: V.
        ring: `(R, W) int32`, W the largest ring; smaller ones are padded with `EMPTY` on the left.
        counts: `(R, V) int32`, or None if no row counts its reply.
    """

    rows: tuple[RowHistory, ...]
    vocab_size: int
    ring: mx.array = field(init=False)
    counts: mx.array | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._load()

    def refresh(self) -> None:
        """Take the arrays anew if some row's newest state is elsewhere."""
        if not all(row.is_in(self) for row in self.rows):
            self._load()

    def record(self, tokens: mx.array, is_recorded: mx.array | None) -> None:
        """Add one token per row, lazily.

        Args:
            tokens: `(R,) int32`.
            is_recorded: `(R, 1) bool`, rows that take the token; None is all.
        """
        column = tokens[:, None]
        ring = mx.concatenate([self.ring[:, 1:], column], axis=1) if self.ring.shape[1] else self.ring
        self.ring = ring if is_recorded is None else mx.where(is_recorded, ring, self.ring)
        if self.counts is not None:
            taken = 1 if is_recorded is None else is_recorded[:, 0].astype(mx.int32)
            self.counts = self.counts.at[mx.arange(tokens.shape[0]), tokens].add(taken)

    def row(self, place: int) -> tuple[mx.array, mx.array | None]:
        """Return one row's ring and counts, lazily."""
        return self.ring[place], None if self.counts is None else self.counts[place]

    def _load(self) -> None:
        width = max(row.needs.ring_size for row in self.rows)
        rings = [_padded(row.ring(), width) for row in self.rows]
        counts = None
        if any(row.needs.counts_reply for row in self.rows):
            nothing = mx.zeros((self.vocab_size,), mx.int32)
            counts = mx.stack([row.counts(self.vocab_size) if row.needs.counts_reply else nothing for row in self.rows])
        self.ring, self.counts = mx.stack(rings), counts
        for place, row in enumerate(self.rows):
            row.move_to(self, place)


def _padded(ring: mx.array, width: int) -> mx.array:
    gap = width - ring.shape[0]
    return mx.concatenate([mx.full((gap,), EMPTY, mx.int32), ring]) if gap else ring
