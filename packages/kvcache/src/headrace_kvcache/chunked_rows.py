"""Rows of a batch in slots that hold a chunk: attention within chunks (Llama 4), unquantized."""

from __future__ import annotations

from headrace_kvcache.attention_rows import AttentionRows
from headrace_kvcache.capacity import DEFAULT_CLASSES, CapacityClasses
from headrace_kvcache.chunked_columns import ChunkedColumns
from headrace_kvcache.forms import PlainForm
from headrace_kvcache.ring_rows import DEFAULT_SLACK


class ChunkedRowBatch(AttentionRows):
    """Slots of all chunked layers of a model; `RowBatch` in every call, with rings of a chunk for slots.

    A query sees the positions of its own chunk up to itself; `attend`'s own `window` can narrow that further. A slot
    has chunk_size + slack columns. Up to slack + 1 positions per step are written in place; a longer step attends over
    the slot as it was and its own keys, then its tail is written. `end` can be lowered by up to slack positions
    wherever the row stands, and as far as the last position's chunk is still held from its start.

    Args:
        num_layers: number of cache-owning layers.
        max_rows: most rows at once.
        chunk_size: positions of a chunk.
        slack: positions that can always be taken back; columns beyond a chunk.
        classes: capacities of the slots below the whole ring.

    Raises:
        InvalidGeometry: a count out of its range.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        max_rows: int,
        chunk_size: int,
        slack: int = DEFAULT_SLACK,
        classes: CapacityClasses = DEFAULT_CLASSES,
    ) -> None:
        columns = ChunkedColumns(chunk_size, slack=slack)
        super().__init__(num_layers, max_rows=max_rows, forms=(PlainForm(),), columns=columns, classes=classes)
