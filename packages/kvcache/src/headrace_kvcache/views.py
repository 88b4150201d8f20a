"""One layer of a batch as a model sees it during one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_kvcache.errors import EmptyCache, InvalidGeometry
from headrace_kvcache.geometry import check_appended
from headrace_kvcache.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_kvcache.buffers import LayerBuffers
    from headrace_kvcache.forms import Fields, StoredForm
    from headrace_kvcache.placement import Run
    from headrace_kvcache.slots import Room


class Group:
    """The rows of a step that lie in one room.

    Attributes:
        room: stored form and capacity class.
        rows: the step's rows, in the order of their seats.
        placement: where they stand.
        size: seats and columns that the room's buffers must have.
    """

    __slots__ = ("_row_ids", "placement", "room", "rows", "size")

    def __init__(
        self, room: Room, rows: Sequence[int], placement: Placement, *, size: tuple[int, int], num_rows: int
    ) -> None:
        self.room = room
        self.rows = tuple(rows)
        self.placement = placement
        self.size = size
        self._row_ids = None if self.rows == tuple(range(num_rows)) else mx.array(self.rows, mx.int32)

    def select(self, array: mx.array) -> mx.array:
        """Return the group's rows of an array `(B, ...)`, in the order of their seats."""
        return array if self._row_ids is None else array[self._row_ids]

    def earlier(self, num_rows: int) -> Group:
        """Return the group as it stands when the step's positions are the last ones already held."""
        now = self.placement
        starts = tuple(start - now.num_tokens for start in now.starts)
        if min(starts) < 0:
            raise EmptyCache(
                f"rows hold {now.starts} positions; {now.num_tokens} queries without keys need at least as many"
            )
        counts = (now.num_tokens,) * len(starts)
        placement = Placement(now.seats, starts, counts, now.num_tokens, columns=now.columns, room=None)
        if placement.is_beside:
            raise EmptyCache(
                f"rows at {now.starts} no longer hold what {now.num_tokens} queries see; attend in the step that "
                f"appends them"
            )
        return Group(self.room, self.rows, placement, size=self.size, num_rows=num_rows)


class Step:
    """Where all rows of one step stand; shared by the views of all layers.

    Attributes:
        num_rows: B.
        num_tokens: T.
        groups: the rows, by room.

    Args:
        leasts: the lowest ends that the rows could be rolled back to before the step.
    """

    __slots__ = ("_earlier", "_leasts", "_offset", "_order", "_starts", "groups", "num_rows", "num_tokens")

    def __init__(
        self, starts: Sequence[int], num_tokens: int, groups: Sequence[Group], *, leasts: Sequence[int]
    ) -> None:
        self.num_rows = len(starts)
        self.num_tokens = num_tokens
        self.groups = tuple(groups)
        self._starts = tuple(starts)
        self._leasts = tuple(leasts)
        self._offset: mx.array | None = None
        self._earlier: Step | None = None
        order = [row for group in groups for row in group.rows]
        is_sorted = order == list(range(self.num_rows))
        self._order = None if is_sorted else mx.array([order.index(row) for row in range(self.num_rows)], mx.int32)

    @property
    def offset(self) -> mx.array:
        """Each row's first position, `(B,) int32`: one array for every layer."""
        if self._offset is None:
            self._offset = mx.array(self._starts, mx.int32)
        return self._offset

    def earlier(self) -> Step:
        """Return the step whose positions are the last ones already held."""
        if self._earlier is None:
            groups = [group.earlier(self.num_rows) for group in self.groups]
            starts = [start - self.num_tokens for start in self._starts]
            if any(start + 1 < least for start, least in zip(starts, self._leasts, strict=True)):
                raise EmptyCache(
                    f"rows at {self._starts} hold all that is to see from ends {self._leasts} on; {self.num_tokens} "
                    f"queries without keys need more"
                )
            self._earlier = Step(starts, self.num_tokens, groups, leasts=self._leasts)
        return self._earlier

    def gather(self, outputs: Sequence[mx.array]) -> mx.array:
        """Join the outputs of all runs, in the order of the step's rows."""
        joined = outputs[0] if len(outputs) == 1 else mx.concatenate(list(outputs))
        return joined if self._order is None else joined[self._order]


class SlotView:
    """One layer of a batch as a model sees it during one step: the selected rows, in the order of their slots.

    It stays valid until the batch is viewed again, advanced, rolled back or left by one of its rows. Drop it after
    the forward: it may hold views of the buffers.
    """

    __slots__ = ("_appended", "_beside", "_forms", "_layer", "_step")

    def __init__(self, layer: LayerBuffers, forms: Sequence[StoredForm], step: Step) -> None:
        self._layer = layer
        self._forms = forms
        self._step = step
        self._appended = False
        self._beside: dict[Run, Fields] = {}

    @property
    def offset(self) -> mx.array:
        """Positions that each row held before this step, `(B,) int32`; one array shared by all layers."""
        return self._step.offset

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
            step = self._held(keys, values)
        else:
            check_appended(queries, keys, values)
            self._append(keys, values)
            step = self._step
        outputs: list[mx.array] = []
        for group in step.groups:
            own, runs = group.select(queries), group.placement.runs
            form = self._forms[group.room[0]]
            buffers = self._layer.of(group.room).fields
            for run in runs:
                seen, mask = run.span(window)
                (low, high), (first, last) = run.seats, run.rows
                fields = self._beside.get(run)
                if fields is None:
                    fields = tuple(field[low:high, :, seen.start : seen.stop] for field in buffers)
                asking = own if len(runs) == 1 else own[first:last]
                outputs.append(form.attention(asking, fields, scale=scale, mask=mask, sinks=sinks, softcap=softcap))
        return step.gather(outputs)

    def _append(self, keys: mx.array, values: mx.array) -> None:
        encoded = {form: self._encoded(form, keys, values) for form in {group.room[0] for group in self._step.groups}}
        for group in self._step.groups:
            own = tuple(group.select(field) for field in encoded[group.room[0]])
            buffers = self._layer.of(group.room)
            buffers.reserve(own, size=group.size)
            if group.placement.is_beside:
                for run in group.placement.runs:
                    self._beside[run] = _beside(run, buffers.fields, own)
            group.placement.store(buffers.fields, own)
        for form, added in encoded.items():
            self._layer.remember(form, added)
        self._appended = True

    def _encoded(self, form: int, keys: mx.array, values: mx.array) -> Fields:
        self._forms[form].check(keys, values)
        added = self._forms[form].encode(keys, values)
        self._layer.check(form, added)
        return added

    def _check_queries(self, queries: mx.array) -> None:
        expected = (self._step.num_rows, self._step.num_tokens)
        shape = queries.shape
        if len(shape) != 4 or (shape[0], shape[2]) != expected:
            raise InvalidGeometry(
                f"queries have shape {shape}; this step has {expected[0]} rows of {expected[1]} positions, so they "
                f"must be ({expected[0]}, Hq, {expected[1]}, D)"
            )

    def _held(self, keys: mx.array | None, values: mx.array | None) -> Step:
        if keys is not None or values is not None:
            raise InvalidGeometry("keys and values must be given together, or both be None to attend without appending")
        step = self._step if self._appended else self._step.earlier()
        if not all(self._layer.of(group.room).fields for group in step.groups):
            raise EmptyCache("this layer holds nothing yet; append keys and values first")
        return step


def _beside(run: Run, buffers: Fields, added: Fields) -> Fields:
    """Return what a run sees when its positions do not fit the ring: the ring as it was, then the new positions."""
    (low, high), (first, last) = run.seats, run.rows
    seen, _ = run.span(None)
    if not seen:
        return tuple(field[first:last] for field in added)
    return tuple(
        mx.concatenate([old[low:high, :, : seen.stop], new[first:last]], axis=2)
        for old, new in zip(buffers, added, strict=True)
    )
