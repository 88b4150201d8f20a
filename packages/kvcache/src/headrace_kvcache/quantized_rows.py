"""Rows of a batch in slots of affine triples, plain and sliding-window."""

from __future__ import annotations

from headrace_kvcache.attention_rows import AttentionRows
from headrace_kvcache.capacity import DEFAULT_CLASSES, CapacityClasses
from headrace_kvcache.columns import LinearColumns, RingColumns
from headrace_kvcache.forms import AffineForm
from headrace_kvcache.ring_rows import DEFAULT_SLACK


class QuantizedRowBatch(AttentionRows):
    """`RowBatch` with keys and values as affine triples, groups along the head dimension.

    Args:
        num_layers: number of cache-owning layers.
        max_rows: most rows at once.
        bits: bits per element.
        group_size: elements per scale and bias.
        classes: capacities of the slots.

    Raises:
        InvalidGeometry: a count out of its range; bits or a group size that MLX does not pack.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        max_rows: int,
        bits: int = 8,
        group_size: int = 64,
        classes: CapacityClasses = DEFAULT_CLASSES,
    ) -> None:
        form = AffineForm(bits, group_size)
        super().__init__(num_layers, max_rows=max_rows, form=form, columns=LinearColumns(), classes=classes)


class RotatingQuantizedRowBatch(AttentionRows):
    """`RotatingRowBatch` with keys and values as affine triples.

    Args:
        num_layers: number of cache-owning layers.
        max_rows: most rows at once.
        window: positions that a query sees, kept ones and itself included.
        keep: first positions that are never overwritten.
        slack: drafts that a round can take back; columns beyond the window.
        bits: bits per element.
        group_size: elements per scale and bias.
        classes: capacities of the slots below the whole ring.

    Raises:
        InvalidGeometry: a count out of its range; bits or a group size that MLX does not pack.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        max_rows: int,
        window: int,
        keep: int = 0,
        slack: int = DEFAULT_SLACK,
        bits: int = 8,
        group_size: int = 64,
        classes: CapacityClasses = DEFAULT_CLASSES,
    ) -> None:
        columns = RingColumns(window, keep=keep, slack=slack)
        form = AffineForm(bits, group_size)
        super().__init__(num_layers, max_rows=max_rows, form=form, columns=columns, classes=classes)
