"""The one waiting queue: by priority, in order of arrival, and nobody waits for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_scheduling.steps import RowId, RowSpec, SharedPrefix

DEFAULT_AGEING_S = 30.0


@define(eq=False)
class WaitingRow:
    """A row without a slot.

    Attributes:
        since: when it came, in seconds of the caller's clock.
        number: its place in the order of arrival.
        leader: a running row that computes a common prefix for it; the row waits until that is there.
        prefix: that prefix.
    """

    spec: RowSpec
    since: float
    number: int
    leader: RowId | None = None
    prefix: SharedPrefix | None = None


@define
class WaitingQueue:
    """Rows without a slot. Batch rows come after all others until they have waited for `ageing_s`."""

    ageing_s: float = DEFAULT_AGEING_S
    _rows: dict[RowId, WaitingRow] = field(factory=dict, init=False)
    _num_added: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[WaitingRow]:
        return iter(self._rows.values())

    def add(self, spec: RowSpec, now: float, *, leader: RowId | None = None) -> None:
        """Queue a row behind those of its priority."""
        self._rows[spec.row_id] = WaitingRow(spec, now, self._num_added, leader)
        self._num_added += 1

    def pop(self, row_id: RowId) -> WaitingRow | None:
        """Take a row out, wherever it is; None if it does not wait."""
        return self._rows.pop(row_id, None)

    def in_order(self, now: float) -> list[WaitingRow]:
        """Return the rows in the order of admission."""
        rows = list(self._rows.values())
        if any(row.spec.is_batch for row in rows):
            rows.sort(key=lambda row: (row.spec.is_batch and now - row.since < self.ageing_s, row.number))
        return rows
