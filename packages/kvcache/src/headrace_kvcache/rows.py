"""Rows of a batch in slots: all layers of one kind, plain attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_kvcache.attention import masked_attention
from headrace_kvcache.buffers import MIN_CAPACITY, SlotBuffers, power_of_two_at_least
from headrace_kvcache.errors import EmptyCache, IntegrityError, InvalidGeometry, InvalidLength
from headrace_kvcache.geometry import check_appended
from headrace_kvcache.placement import Placement
from headrace_kvcache.slots import SlotTable, check_counts

if TYPE_CHECKING:
    from collections.abc import Sequence


class SlotView:
    """One layer of a batch as a model sees it during one step: the selected rows, in the order of their slots.

    It stays valid until the batch is advanced, rolled back or left by one of its rows.
    """

    __slots__ = ("_appended", "_buffers", "_earlier", "_placement", "_size")

    def __init__(
        self, buffers: SlotBuffers, placement: Placement, size: tuple[int, int], earlier: list[Placement]
    ) -> None:
        self._buffers = buffers
        self._placement = placement
        self._size = size
        self._earlier = earlier
        self._appended = False

    @property
    def offset(self) -> mx.array:
        """Positions that each row held before this step, `(B,) int32`; one array shared by all layers."""
        return self._placement.offset

    def attend(
        self,
        queries: mx.array,
        keys: mx.array | None,
        values: mx.array | None,
        *,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """Append and attend, see `attend`. The cache is read through views and never gathered."""
        self._check_queries(queries)
        if keys is None or values is None:
            buffers, placement = self._held(keys, values)
        else:
            check_appended(queries, keys, values)
            placement = self._placement
            buffers = self._buffers.write(placement, keys, values, size=self._size)
            self._appended = True
        outputs: list[mx.array] = []
        for run in placement.runs:
            columns, mask = run.span(window)
            (low, high), (first, last) = run.slots, run.rows
            seen = slice(columns.start, columns.stop)
            outputs.append(
                masked_attention(
                    queries if last - first == len(placement.slots) else queries[first:last],
                    buffers[0][low:high, :, seen],
                    buffers[1][low:high, :, seen],
                    scale=scale,
                    mask=mask,
                    sinks=sinks,
                    softcap=softcap,
                )
            )
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _check_queries(self, queries: mx.array) -> None:
        expected = (len(self._placement.slots), self._placement.num_tokens)
        shape = queries.shape
        if len(shape) != 4 or (shape[0], shape[2]) != expected:
            raise InvalidGeometry(
                f"queries have shape {shape}; this step has {expected[0]} rows of {expected[1]} positions, so they "
                f"must be ({expected[0]}, Hq, {expected[1]}, D)"
            )

    def _held(self, keys: mx.array | None, values: mx.array | None) -> tuple[tuple[mx.array, mx.array], Placement]:
        if keys is not None or values is not None:
            raise InvalidGeometry("keys and values must be given together, or both be None to attend without appending")
        placement = self._placement if self._appended else self._last_positions()
        held_keys, held_values = self._buffers.keys, self._buffers.values
        if held_keys is None or held_values is None:
            raise EmptyCache("this layer holds nothing yet; append keys and values first")
        return (held_keys, held_values), placement

    def _last_positions(self) -> Placement:
        if not self._earlier:
            now = self._placement
            starts = tuple(start - now.num_tokens for start in now.starts)
            if min(starts) < 0:
                raise EmptyCache(
                    f"rows hold {now.starts} positions; {now.num_tokens} queries without keys need at least as many"
                )
            self._earlier.append(Placement(now.slots, starts, now.num_tokens))
        return self._earlier[0]


class RowBatch:
    """Slots of all layers of a model, one row each, written in place and never merged or padded.

    Per layer one key and one value buffer `(S, H, C, D)`: S grows by doubling up to `max_rows`, C in powers of two
    from 256; both are released when the last row leaves. A row is a slot and the half-open interval [0, end).
    Joining costs nothing, leaving frees the slot, lowering `end` rolls back.

    A step is `views = view(slots, T)`, the forward with `views` as its caches, then `advance(slots, T)`. Keep no
    reference to the buffers: a live view or reference turns the next write into a full copy.

    Args:
        num_layers: number of cache-owning layers.
        max_rows: most rows at once.

    Raises:
        InvalidGeometry: a count that is not an integer of at least 1.
    """

    def __init__(self, num_layers: int, *, max_rows: int) -> None:
        if type(num_layers) is not int or num_layers < 1:
            raise InvalidGeometry(f"num_layers is {num_layers!r}; it must be an integer of at least 1")
        self._table = SlotTable(max_rows)
        self._layers = [SlotBuffers() for _ in range(num_layers)]
        self._size = (0, 0)

    @property
    def max_rows(self) -> int:
        """The most rows that the batch holds at once."""
        return self._table.max_rows

    @property
    def joined(self) -> tuple[int, ...]:
        """The slots that hold a row, ascending."""
        return self._table.joined

    def join(self) -> int:
        """Seat a new, empty row in the lowest free slot and return the slot.

        Raises:
            SlotsExhausted: every slot is taken.
        """
        return self._table.join()

    def leave(self, slot: int) -> None:
        """Free a row's slot; the last row to leave releases all buffers.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        self._table.leave(slot)
        if not self._table.joined:
            self._size = (0, 0)
            for layer in self._layers:
                layer.release()

    def end(self, slot: int) -> int:
        """Return the number of positions that a row holds.

        Raises:
            InvalidSlots: the slot holds no row.
        """
        return self._table.end(slot)

    def set_end(self, slot: int, num_tokens: int) -> None:
        """Roll a row back to its first `num_tokens` positions.

        Raises:
            InvalidSlots: the slot holds no row.
            InvalidLength: `num_tokens` is not from 0 to the row's end.
        """
        self._table.set_end(slot, num_tokens)

    def view(self, slots: Sequence[int], num_tokens: int, *, lengths: Sequence[int] | None = None) -> list[SlotView]:
        """Return one cache per layer for a step that appends `num_tokens` positions to each of some rows.

        Rows of the step are in the order of `slots`. A row whose length is below `num_tokens` is padded on the
        right: its outputs beyond the length mean nothing and `advance` by the lengths forgets them.

        Args:
            slots: slots of joined rows, strictly ascending.
            num_tokens: T, positions that the forward's input has per row.
            lengths: how many of them are real, per row; None for all.

        Raises:
            InvalidSlots: a slot holds no row, or the order is wrong.
            InvalidLength: a count outside its range.
        """
        starts = self._table.ends(slots)
        check_counts(len(slots), num_tokens, lengths)
        placement = Placement(slots, starts, num_tokens)
        num_slots = min(power_of_two_at_least(slots[-1] + 1), self._table.max_rows)
        capacity = power_of_two_at_least(placement.max_end, least=MIN_CAPACITY)
        self._size = size = (max(self._size[0], num_slots), max(self._size[1], capacity))
        earlier: list[Placement] = []
        return [SlotView(layer, placement, size, earlier) for layer in self._layers]

    def advance(self, slots: Sequence[int], num_tokens: int | Sequence[int]) -> None:
        """Keep what the last step appended: call it once the forward is built.

        Args:
            slots: the slots that the view was made for.
            num_tokens: positions to keep, for all rows or per row.

        Raises:
            InvalidSlots: a slot holds no row, or the order is wrong.
            InvalidLength: a count below 1, or beyond what the buffers hold.
        """
        ends = self._table.ends(slots)
        if isinstance(num_tokens, int):
            counts = check_counts(len(slots), num_tokens, None)
        else:
            counts = check_counts(len(slots), max(self._size[1], 1), num_tokens)
        if any(end + count > self._size[1] for end, count in zip(ends, counts, strict=True)):
            raise InvalidLength(
                f"rows at {ends} cannot advance by {counts}: no view made room for that; call view() first"
            )
        self._table.advance(slots, counts)

    @property
    def arrays(self) -> list[mx.array]:
        """All buffers, for inspection and for `mx.eval`; do not keep the list.

        A step's outputs depend on its writes, so evaluating them is enough. Handing the buffers to `mx.async_eval`
        as well can pin them until that step ends, and a write dispatched before then copies its whole buffer.
        """
        return [array for layer in self._layers for array in layer.arrays]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers allocated now."""
        return sum(array.nbytes for array in self.arrays)

    def check_integrity(self) -> None:
        """Check the books against the buffers, without evaluating anything.

        Raises:
            IntegrityError: a row ends beyond its buffers, a buffer outlived the last row, or keys and values differ.
        """
        joined = self._table.joined
        longest = max((self._table.end(slot) for slot in joined), default=0)
        for index, layer in enumerate(self._layers):
            if (layer.keys is None) != (layer.values is None):
                raise IntegrityError(f"layer {index} has only one of its two buffers")
            if layer.keys is None or layer.values is None:
                continue
            self._check_layer(index, layer.keys, layer.values, longest)

    def _check_layer(self, index: int, keys: mx.array, values: mx.array, longest: int) -> None:
        if not self._table.joined:
            raise IntegrityError(f"layer {index} holds {keys.nbytes + values.nbytes} bytes while no row is joined")
        if keys.shape[:3] != values.shape[:3]:
            raise IntegrityError(f"layer {index} has keys {keys.shape} and values {values.shape}")
        if keys.shape[2] < longest or keys.shape[0] > self._table.max_rows:
            raise IntegrityError(f"layer {index} has buffers {keys.shape} for a row that ends at {longest}")
