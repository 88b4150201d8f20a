"""Which slots a single-row cache needs: the declared kind that layers of a batch are grouped by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from attrs import frozen

from headrace_kvcache.chunked import ChunkedKVCache
from headrace_kvcache.chunked_rows import ChunkedRowBatch
from headrace_kvcache.errors import UnsupportedCache
from headrace_kvcache.forms import AffineForm
from headrace_kvcache.plain import KVCache
from headrace_kvcache.quantized import QuantizedKVCache
from headrace_kvcache.quantized_rows import QuantizedRowBatch, RotatingQuantizedRowBatch
from headrace_kvcache.recurrent import RecurrentCache
from headrace_kvcache.recurrent_rows import RecurrentRowBatch
from headrace_kvcache.ring_rows import RotatingRowBatch
from headrace_kvcache.rotating import RotatingKVCache, RotatingQuantizedKVCache
from headrace_kvcache.rows import RowBatch

if TYPE_CHECKING:
    from headrace_kvcache.capacity import CapacityClasses

Rows: TypeAlias = (
    "RowBatch | RotatingRowBatch | ChunkedRowBatch | QuantizedRowBatch | RotatingQuantizedRowBatch | RecurrentRowBatch"
)


class RowKind(Protocol):
    """What a kind of cache needs to share slots; equal kinds share one batch."""

    def make(self, num_layers: int, *, max_rows: int, classes: CapacityClasses, slack: int) -> Rows:
        """Make the slots of `num_layers` layers of this kind."""
        ...


@frozen(kw_only=True)
class AttentionKind:
    """Attention over keys and values.

    Attributes:
        window: positions that a query sees, None for all.
        keep: first positions that are never overwritten.
        bits: bits per element, None for unquantized.
        group_size: elements per scale and bias.
        starts_unquantized: whether rows wait for `convert` before they are quantized.
    """

    window: int | None = None
    keep: int = 0
    bits: int | None = None
    group_size: int = 64
    starts_unquantized: bool = False

    def make(self, num_layers: int, *, max_rows: int, classes: CapacityClasses, slack: int) -> Rows:
        """Make the slots of `num_layers` layers of this kind."""
        if self.window is None and self.bits is None:
            return RowBatch(num_layers, max_rows=max_rows, classes=classes)
        if self.window is None:
            assert self.bits is not None
            return QuantizedRowBatch(
                num_layers,
                max_rows=max_rows,
                bits=self.bits,
                group_size=self.group_size,
                starts_unquantized=self.starts_unquantized,
                classes=classes,
            )
        if self.bits is None:
            return RotatingRowBatch(
                num_layers, max_rows=max_rows, window=self.window, keep=self.keep, slack=slack, classes=classes
            )
        return RotatingQuantizedRowBatch(
            num_layers,
            max_rows=max_rows,
            window=self.window,
            keep=self.keep,
            slack=slack,
            bits=self.bits,
            group_size=self.group_size,
            starts_unquantized=self.starts_unquantized,
            classes=classes,
        )


@frozen(kw_only=True)
class ChunkedKind:
    """Attention within chunks of `chunk_size` positions."""

    chunk_size: int

    def make(self, num_layers: int, *, max_rows: int, classes: CapacityClasses, slack: int) -> Rows:
        """Make the slots of `num_layers` layers of this kind."""
        return ChunkedRowBatch(num_layers, max_rows=max_rows, chunk_size=self.chunk_size, slack=slack, classes=classes)


@frozen(kw_only=True)
class RecurrentKind:
    """A recurrent layer of `size` arrays."""

    size: int

    def make(self, num_layers: int, *, max_rows: int, classes: CapacityClasses, slack: int) -> Rows:
        """Make the slots of `num_layers` layers of this kind."""
        del classes, slack
        return RecurrentRowBatch(num_layers, max_rows=max_rows, size=self.size)


def row_kind(cache: object, *, starts_unquantized: bool = False) -> RowKind:
    """Return the kind of slots that a single-row cache declares.

    Args:
        cache: a `KVCache`, `QuantizedKVCache`, `RotatingKVCache`, `RotatingQuantizedKVCache`, `ChunkedKVCache` or
            `RecurrentCache`.
        starts_unquantized: whether rows of quantized kinds wait for `convert`.

    Raises:
        UnsupportedCache: a cache of any other kind; nothing is guessed.
    """
    if isinstance(cache, KVCache):
        return AttentionKind()
    if isinstance(cache, RotatingKVCache):
        return AttentionKind(window=cache.max_size, keep=cache.keep)
    if isinstance(cache, ChunkedKVCache):
        return ChunkedKind(chunk_size=cache.chunk_size)
    if isinstance(cache, RecurrentCache):
        return RecurrentKind(size=len(cache.state[0]))
    if isinstance(cache, QuantizedKVCache | RotatingQuantizedKVCache):
        form = cache.form
        assert isinstance(form, AffineForm)
        ring = cache if isinstance(cache, RotatingQuantizedKVCache) else None
        return AttentionKind(
            window=None if ring is None else ring.max_size,
            keep=0 if ring is None else ring.keep,
            bits=form.bits,
            group_size=form.group_size,
            starts_unquantized=starts_unquantized,
        )
    raise UnsupportedCache(f"a {type(cache).__name__} declares no kind of slots, so it cannot be batched")
