"""Rows of a batch in slots: all layers of one kind, plain attention."""

from __future__ import annotations

from headrace_kvcache.attention_rows import AttentionRows
from headrace_kvcache.capacity import DEFAULT_CLASSES, CapacityClasses
from headrace_kvcache.columns import LinearColumns
from headrace_kvcache.forms import PlainForm


class RowBatch(AttentionRows):
    """Slots of all layers of a model, one row each, written in place and never merged or padded.

    A row is a slot and the half-open interval [0, end). It lives in the smallest capacity class that holds it; a row
    that outgrows its class is copied into the next one, its own bytes only, and keeps its slot number. Joining costs
    nothing, leaving frees the slot, lowering `end` rolls back.

    Per layer and class one key and one value buffer `(S, H, C, D)`: S grows by doubling up to `max_rows`, C in powers
    of two from 256 up to the class's capacity; both are released when the last row of the class leaves. Attention
    runs per class and per run of neighbouring seats, so that a short row never attends over a long row's columns.

    A step is `views = view(slots, T)`, the forward with `views` as its caches, then `advance(slots, T)`. Keep no
    reference to the buffers: a live view or reference turns the next write into a full copy.

    Args:
        num_layers: number of cache-owning layers.
        max_rows: most rows at once.
        classes: capacities of the slots; by default 1,024, 4,096 and doubling from there.

    Raises:
        InvalidGeometry: a count that is not an integer of at least 1.
    """

    def __init__(self, num_layers: int, *, max_rows: int, classes: CapacityClasses = DEFAULT_CLASSES) -> None:
        super().__init__(num_layers, max_rows=max_rows, forms=(PlainForm(),), columns=LinearColumns(), classes=classes)
