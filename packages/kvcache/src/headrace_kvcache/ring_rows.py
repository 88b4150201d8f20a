"""Rows of a batch in slots that are rings: sliding-window attention, unquantized."""

from __future__ import annotations

from headrace_kvcache.attention_rows import AttentionRows
from headrace_kvcache.capacity import DEFAULT_CLASSES, CapacityClasses
from headrace_kvcache.columns import RingColumns
from headrace_kvcache.forms import PlainForm

DEFAULT_SLACK = 16


class RotatingRowBatch(AttentionRows):
    """Slots of all sliding-window layers of a model; `RowBatch` in every call, with rings for slots.

    A query at p sees the positions q <= p with q < keep or p - q < window - keep; `attend`'s own `window` can narrow
    that further. A ring has window + slack columns. Up to slack + 1 positions per step are written in place. Wherever
    the ring stands, `end` can be lowered by up to slack positions, which equals never having appended them. A longer
    chunk attends over the ring as it was and its own keys, then its tail is written. Before a ring is full its
    row lives in the capacity classes below window + slack.

    Args:
        num_layers: number of cache-owning layers.
        max_rows: most rows at once.
        window: positions that a query sees, kept ones and itself included.
        keep: first positions that are never overwritten.
        slack: positions that can be taken back; columns beyond the window.
        classes: capacities of the slots below the whole ring.

    Raises:
        InvalidGeometry: a count out of its range.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        max_rows: int,
        window: int,
        keep: int = 0,
        slack: int = DEFAULT_SLACK,
        classes: CapacityClasses = DEFAULT_CLASSES,
    ) -> None:
        columns = RingColumns(window, keep=keep, slack=slack)
        super().__init__(num_layers, max_rows=max_rows, forms=(PlainForm(),), columns=columns, classes=classes)
