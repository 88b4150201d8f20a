"""Rows of a batch in slots of affine triples, plain and sliding-window."""

from __future__ import annotations

from headrace_kvcache.attention_rows import AttentionRows
from headrace_kvcache.capacity import DEFAULT_CLASSES, CapacityClasses
from headrace_kvcache.columns import LinearColumns, RingColumns
from headrace_kvcache.forms import AffineForm, PlainForm, StoredForm
from headrace_kvcache.ring_rows import DEFAULT_SLACK


class QuantizedRowBatch(AttentionRows):
    """`RowBatch` with keys and values as affine triples, groups along the head dimension.

    Rows that start unquantized keep their slot when `convert` quantizes them; both kinds may share a step.

    Args:
        num_layers: number of cache-owning layers.
        max_rows: most rows at once.
        bits: bits per element.
        group_size: elements per scale and bias.
        starts_unquantized: whether new rows are stored as they are until `convert(slot)`.
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
        starts_unquantized: bool = False,
        classes: CapacityClasses = DEFAULT_CLASSES,
    ) -> None:
        forms = _forms(bits, group_size, starts_unquantized=starts_unquantized)
        super().__init__(num_layers, max_rows=max_rows, forms=forms, columns=LinearColumns(), classes=classes)


class RotatingQuantizedRowBatch(AttentionRows):
    """`RotatingRowBatch` with keys and values as affine triples.

    Args:
        num_layers: number of cache-owning layers.
        max_rows: most rows at once.
        window: positions that a query sees, kept ones and itself included.
        keep: first positions that are never overwritten.
        slack: positions that can be taken back; columns beyond the window.
        bits: bits per element.
        group_size: elements per scale and bias.
        starts_unquantized: whether new rows are stored as they are until `convert(slot)`.
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
        starts_unquantized: bool = False,
        classes: CapacityClasses = DEFAULT_CLASSES,
    ) -> None:
        columns = RingColumns(window, keep=keep, slack=slack)
        forms = _forms(bits, group_size, starts_unquantized=starts_unquantized)
        super().__init__(num_layers, max_rows=max_rows, forms=forms, columns=columns, classes=classes)


def _forms(bits: int, group_size: int, *, starts_unquantized: bool) -> tuple[StoredForm, ...]:
    form = AffineForm(bits, group_size)
    return (PlainForm(), form) if starts_unquantized else (form,)
