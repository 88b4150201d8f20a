"""The arrays of recurrent slots: per layer and array one buffer with a seat for each row, replaced as a whole."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx

from headrace_kvcache.errors import IntegrityError, InvalidGeometry
from headrace_kvcache.joined_replay import parted, replay_layers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headrace_kvcache.joined_replay import Group, JoinedReplay
    from headrace_kvcache.recurrent_views import Picked
    from headrace_kvcache.replay import Arrays, Kept

    # What layers stored: per layer, arrays `(B, ...)` by index.
    Stored: TypeAlias = Iterable[Iterable[tuple[int, mx.array | None]]]


class RecurrentBuffers:
    """Buffers `(S, ...)` of all layers, S seats each; None until something is written.

    Args:
        num_layers: number of recurrent layers.
        size: arrays per layer.

    Attributes:
        layers: each layer's buffers, by index.
    """

    __slots__ = ("_joined", "_joined_seats", "layers", "size")

    def __init__(self, num_layers: int, size: int) -> None:
        self.layers: list[Arrays] = [[None] * size for _ in range(num_layers)]
        self.size = size
        # Buffers that are parts of one array per group of layers since the last replay: the next need not join them.
        self._joined: dict[Group, Arrays] = {}
        self._joined_seats = 0

    def release(self) -> None:
        """Drop all buffers; steps in flight keep what they still read."""
        self.layers = [[None] * self.size for _ in self.layers]
        self._joined = {}

    @property
    def arrays(self) -> list[mx.array]:
        """The buffers that exist now."""
        return [array for buffers in self.layers for array in buffers if array is not None]

    def put(self, picked: Picked, stored: Stored, *, num_seats: int, left: mx.array | None = None) -> None:
        """Write what layers stored, or the rows `left` of it, into seats of buffers of at least `num_seats`."""
        self._joined = {}
        for buffers, arrays in zip(self.layers, stored, strict=True):
            for index, array in arrays:
                if array is not None:
                    rows = array if left is None else array[left]
                    buffers[index] = picked.put(buffers[index], rows, num_seats)

    def copied(self, layer: int, picked: Picked) -> Arrays:
        """Return copies `(B, ...)` of some rows of a layer, computed at once."""
        copies = [None if array is None else mx.contiguous(array) for array in picked.take_all(self.layers[layer])]
        mx.eval([array for array in copies if array is not None])
        return copies

    # ---- replays -----------------------------------------------------------------------------------------------

    def replayed(self, picked: Picked, steps: Sequence[tuple[list[JoinedReplay], Kept]]) -> dict[Group, Arrays]:
        """Return the arrays of some rows after what stays of some steps, see `replay_layers`."""
        held = self._joined if picked.covers(self._joined_seats) else {}
        return replay_layers(steps, lambda group: [picked.take_all(self.layers[layer]) for layer in group], held)

    def put_replayed(
        self, picked: Picked, replayed: dict[Group, Arrays], *, num_seats: int, left: mx.array | None = None
    ) -> None:
        """Write what a replay returned, or the rows `left` of it, into seats.

        Where it is all that the buffers hold, its parts become the buffers.
        """
        # A lone layer's replay may return arrays that the layer holds, too.
        is_all = left is None and picked.covers(num_seats) and 1 not in map(len, replayed)
        layers = self.layers if is_all else [list(buffers) for buffers in self.layers]
        for group, arrays in replayed.items():
            for layer, part in zip(group, parted(arrays, len(group)), strict=True):
                layers[layer][:] = part
        if is_all:
            self._joined, self._joined_seats = replayed, num_seats
        else:
            self.put(picked, map(enumerate, layers), num_seats=num_seats, left=left)

    # ---- checks ------------------------------------------------------------------------------------------------

    def check_states(self, states: Sequence[tuple[Arrays, int]]) -> None:
        """Check that arrays `(1, ...)` and the number of positions, per layer, are a row that fits.

        Raises:
            InvalidGeometry: they are not.
        """
        ends = {end for _, end in states}
        if len(states) != len(self.layers) or len(ends) != 1 or any(len(each) != self.size for each, _ in states):
            raise InvalidGeometry(
                f"{len(states)} caches at {sorted(ends)} are no row of {len(self.layers)} layers, {self.size} arrays "
                f"each"
            )
        pairs = itertools.chain.from_iterable(
            zip(buffers, arrays, strict=True) for buffers, (arrays, _) in zip(self.layers, states, strict=True)
        )
        for buffer, array in pairs:
            if array is not None and (
                array.shape[0] != 1
                or (buffer is not None and (array.shape[1:], array.dtype) != (buffer.shape[1:], buffer.dtype))
            ):
                held = None if buffer is None else (buffer.shape, buffer.dtype)
                raise InvalidGeometry(f"an array {array.shape} {array.dtype} does not fit slots of {held}")

    def check_integrity(self, num_seats: int) -> None:
        """Check that buffers reach `num_seats` seats, and that joined ones are what they are parts of.

        Raises:
            IntegrityError: they do not.
        """
        for index, buffers in enumerate(self.layers):
            for buffer in buffers:
                if buffer is not None and buffer.shape[0] < num_seats:
                    raise IntegrityError(
                        f"layer {index} has an array {buffer.shape}; a row that holds something has seat "
                        f"{num_seats - 1}"
                    )
        for group, arrays in self._joined.items():
            for array in arrays:
                if array is not None and array.shape[0] != len(group) * self._joined_seats:
                    raise IntegrityError(
                        f"{self._joined_seats} seats of layers {group} cannot be the parts of an array {array.shape}"
                    )
