"""The single-row cache of recurrent layers: a fixed number of arrays that sum up everything so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, TypeAlias

import mlx.core as mx

from headrace_kvcache.errors import IntegrityError, InvalidGeometry, NotTrimmable
from headrace_kvcache.merging import Mergeable
from headrace_kvcache.replay import Recorded, Replay, kept_steps, untold
from headrace_kvcache.rounds import RoundBooks, check_drafts
from headrace_kvcache.stored import check_count

if TYPE_CHECKING:
    from collections.abc import Sequence

State: TypeAlias = "tuple[list[mx.array | None], mx.array | None, int]"


class RecurrentCache(Mergeable):
    """Arrays of a recurrent layer, by index: usually the tail of a convolution, then a float32 state.

    It has no time axis, costs nothing per token and can never be trimmed or quantized. Layers replace the arrays (they
    never write into them) and call `advance`. Rows padded on the right tell their `lengths`; `make_mask` then says
    which inputs are real.

    A round of speculation keeps the arrays from before it. A layer that tells how to replay a step (`record`) lets
    `spec_round_rollback` go back to these and sum up again what is kept.

    Args:
        size: number of arrays.

    Attributes:
        offset: number of positions summed up, as far as the layer tells it by `advance`.
        lengths: how many of the coming inputs of each row are real, `(B,)`; None for all.
        can_replay: whether the layer tells how to replay a step; None until it made one. A state that came from
            elsewhere, as from a file, does not say which layer goes on with it: False until that made a step.
    """

    __slots__ = ("_arrays", "_before", "_counts", "_round", "_told", "can_replay", "lengths", "offset")

    def __init__(self, size: int = 2) -> None:
        if type(size) is not int or size < 1:
            raise InvalidGeometry(f"size is {size!r}; it must be an integer of at least 1")
        self._arrays: list[mx.array | None] = [None] * size
        self.lengths: mx.array | None = None
        self.offset = 0
        self.can_replay: bool | None = None
        self._round = RoundBooks()
        self._forget_round()

    def __getitem__(self, index: int) -> mx.array | None:
        return self._arrays[index]

    def __setitem__(self, index: int, array: mx.array | None) -> None:
        self._arrays[index] = array
        if self.can_replay is None:
            self.can_replay = False

    def make_mask(self, num_tokens: int) -> mx.array | None:
        """Return which of the coming inputs are real, `(B, num_tokens)`, or None for all."""
        return None if self.lengths is None else mx.arange(num_tokens) < self.lengths[:, None]

    def advance(self, num_tokens: int) -> None:
        """Tell that `num_tokens` inputs per row were summed up."""
        if self._round.is_open:
            self._counts.append(self._counts_of(num_tokens))
        self.offset += num_tokens
        if self.lengths is not None:
            self.lengths = self.lengths - num_tokens

    def record(self, replay: Replay, *inputs: mx.array) -> None:
        """Tell how to sum up the first positions of the step again, for a round that is rolled back.

        Call it in every step: outside of rounds it costs nothing and keeps nothing. A replay that takes its inputs
        as arguments must depend on its arguments alone, and each row of what it returns on that row of them:
        layers that tell the same function are then replayed in one call, which sees their rows behind each other.
        What belongs to a layer, as weights do, goes into a replay of its own that takes no inputs.

        Args:
            replay: called as `replay(arrays, kept, *inputs)` with the layer's arrays `(B, ...)` before the step, None
                where there were none, and a `Kept`: how many positions stay in each row, 0 included, with
                `lengths (B,) int32` and a `mask(T)`; returns the arrays after these, bit for bit.
            inputs: what the replay needs of the step, each `(B, ...)`.
        """
        self.can_replay = True
        if self._round.is_open:
            self._told.append((replay, inputs))

    # ---- rounds ------------------------------------------------------------------------------------------------

    @property
    def is_in_round(self) -> bool:
        """Whether a round of speculation is open."""
        return self._round.is_open

    def spec_round_fits(self, drafts: int) -> bool:
        """Return whether drafts can be taken back: unless the layer made a step and did not tell how to replay it.

        Raises:
            InvalidCountError: `drafts` is not an integer of at least 0.
        """
        check_drafts(drafts)
        return not drafts or self.can_replay is not False

    def spec_round_begin(self) -> None:
        """Open a round and keep the arrays as they are; nothing is copied.

        Raises:
            RoundRefusedError: a round is open.
        """
        self._round.begin(self._row_ends())
        self._before = list(self._arrays), self.lengths, self.offset

    def spec_round_commit(self) -> None:
        """Keep everything since `spec_round_begin`.

        Raises:
            RoundRefusedError: no round is open.
        """
        self._round.close()
        self._forget_round()

    def spec_round_rollback(self, keep: int | Sequence[int]) -> None:
        """Keep the first `keep` positions that were summed up since `spec_round_begin`: pending and accepted ones.

        Raises:
            RoundRefusedError: no round is open, or the layer did not tell how to replay.
            InvalidCountError: a count that is not from 0 to what was summed up.
        """
        ends = self._row_ends()
        targets = self.rollback_ends(keep)
        if targets != ends:
            self._go_back([targets[row] - start for row, start in self._round.started().items()])
            self._set_row_ends(targets)
        self.spec_round_commit()

    def rollback_ends(self, keep: int | Sequence[int]) -> dict[int, int]:
        """Return the ends that `spec_round_rollback(keep)` would leave, or raise as it would; nothing changes."""
        ends = self._row_ends()
        targets = self._round.targets(keep, ends)
        if targets != ends and not self._knows_replays:
            raise untold()
        return targets

    def _go_back(self, keeps: list[int]) -> None:
        arrays, lengths, offset = self._before
        num_rows = next((array.shape[0] for array in self._arrays if array is not None), len(keeps))
        # One entry of the books may stand for several rows of arrays that always move together.
        spread = num_rows // len(keeps)
        steps = [(counts * spread, told) for counts, told in zip(self._counts, self._told, strict=True)]
        for (replay, inputs), kept in kept_steps(steps, keeps * spread):
            arrays = replay(arrays, kept, *inputs)
        self._arrays = list(arrays)
        self.lengths = None if lengths is None else lengths - max(keeps)
        self.offset = offset + max(keeps)

    @property
    def _knows_replays(self) -> bool:
        # Unless the layer recorded in every step, nobody knows which replay belongs to which.
        return len(self._told) == len(self._counts)

    def _forget_round(self) -> None:
        self._before: State = [], None, 0
        self._counts: list[tuple[int, ...]] = []
        self._told: list[Recorded] = []

    def _row_ends(self) -> dict[int, int]:
        return {0: self.offset}

    def _set_row_ends(self, ends: dict[int, int]) -> None:
        self.offset = ends[0]

    def _counts_of(self, num_tokens: int) -> tuple[int, ...]:
        """Return how many of a step's inputs are real, per row of the books."""
        return (num_tokens,)

    def check_integrity(self) -> None:
        """Check that all arrays have the same rows, without evaluating anything.

        Raises:
            IntegrityError: they differ.
        """
        rows = {array.shape[0] for array in self.arrays}
        if len(rows) > 1:
            raise IntegrityError(f"the arrays of a recurrent layer have {sorted(rows)} rows; they must agree")

    # ---- facts -------------------------------------------------------------------------------------------------

    def trim(self, num_tokens: int) -> int:
        """Return 0 for 0.

        Raises:
            InvalidLength: a negative number, or not an integer.
            NotTrimmable: any other number: a sum cannot forget its last terms.
        """
        check_count(num_tokens)
        if num_tokens:
            raise NotTrimmable(f"a recurrent state cannot forget its last {num_tokens} positions")
        return 0

    def is_trimmable(self) -> bool:
        """Return False: a sum cannot forget its last terms."""
        return False

    def size(self) -> int:
        """Return 0: there is no time axis."""
        return 0

    def empty(self) -> bool:
        """Return whether nothing was ever stored."""
        return self._arrays[0] is None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays held now."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays that are there, in their order."""
        return [array for array in self._arrays if array is not None]

    @property
    def state(self) -> State:
        """Arrays in array objects of their own, lengths and offset."""
        return [None if array is None else array[...] for array in self._arrays], self.lengths, self.offset

    @state.setter
    def state(self, state: State) -> None:
        arrays, self.lengths, self.offset = state
        self._arrays = list(arrays)
        if self.can_replay is None and self.arrays:
            self.can_replay = False

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Make a cache from another one's `state`; the two share bytes until one of them is written."""
        cache = cls(len(state[0]))
        cache.state = state
        cache.state = cache.state
        return cache
