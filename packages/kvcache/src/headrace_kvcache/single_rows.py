"""Between a row of a batch and the single-row caches that mlx-lm knows: copies, in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx
from attrs import frozen

from headrace_kvcache.chunked import ChunkedKVCache
from headrace_kvcache.chunked_columns import ChunkedColumns, chunk_start
from headrace_kvcache.columns import Geometry, LinearColumns, RingColumns
from headrace_kvcache.errors import InvalidGeometry, UnsupportedCache
from headrace_kvcache.fields import joined, part, slabs
from headrace_kvcache.forms import AffineForm, PlainForm
from headrace_kvcache.plain import KVCache
from headrace_kvcache.quantized import QuantizedKVCache
from headrace_kvcache.ring import Ring
from headrace_kvcache.rotating import RotatingKVCache, RotatingQuantizedKVCache

if TYPE_CHECKING:
    from headrace_kvcache.columns import Columns
    from headrace_kvcache.forms import Fields, StoredForm

SingleCache: TypeAlias = "KVCache | QuantizedKVCache | RotatingKVCache | RotatingQuantizedKVCache | ChunkedKVCache"
_SINGLE = (KVCache, QuantizedKVCache, RotatingKVCache, RotatingQuantizedKVCache, ChunkedKVCache)


@frozen(kw_only=True)
class SingleRow:
    """What a single-row cache holds.

    Attributes:
        end: positions appended.
        form: how they are stored.
        geometry: what a position sees.
        fields: `(1, H, n, ...)` in the order of positions; none if nothing is held.
    """

    end: int
    form: StoredForm
    geometry: Geometry
    fields: Fields


def read_single(cache: object) -> SingleRow:
    """Return what a single-row cache holds, in views that must be dropped before its next append.

    Raises:
        UnsupportedCache: a cache of another kind.
        InvalidGeometry: a chunked cache that was trimmed and no longer holds its last position's chunk.
    """
    if not isinstance(cache, _SINGLE):
        raise UnsupportedCache(
            f"a {type(cache).__name__} cannot share slots of keys and values; it must be one of "
            f"{', '.join(kind.__name__ for kind in _SINGLE)}"
        )
    if isinstance(cache, ChunkedKVCache):
        return _read_chunked(cache)
    keys, values, end, *numbers = cache.state
    fields = () if keys is None or values is None or not end else (*_as_fields(keys), *_as_fields(values))
    if isinstance(cache, KVCache | QuantizedKVCache):
        held = part(fields, 0, end) if fields else ()
        return SingleRow(end=end, form=cache.form, geometry=Geometry(), fields=held)
    keep, max_size, head = numbers[:3]
    if fields:
        ring = Ring(max_size, keep, end, head, end if head == end else fields[0].shape[2])
        fields = joined([part(fields, low, high) for low, high in ring.pieces(max_size)])
    return SingleRow(end=end, form=cache.form, geometry=Geometry(max_size, keep), fields=fields)


def _read_chunked(cache: ChunkedKVCache) -> SingleRow:
    end, first_held = cache.offset, cache.start_position
    first = chunk_start(end, cache.chunk_size)
    if first < first_held:
        raise InvalidGeometry(
            f"a chunked cache trimmed to {end} holds positions from {first_held} on; a row needs its last chunk from "
            f"{first} on: append before it joins"
        )
    keys, values, *_ = cache.state
    fields = () if keys is None or values is None or not end else (*_as_fields(keys), *_as_fields(values))
    held = part(fields, first - first_held, end - first_held) if fields else ()
    return SingleRow(end=end, form=cache.form, geometry=Geometry(chunk_size=cache.chunk_size), fields=held)


def make_single(form: StoredForm, columns: Columns, end: int, fields: Fields) -> SingleCache:
    """Return a single-row cache that takes over copies of a row's contents, computed at once.

    Args:
        form: how the row is stored.
        columns: the batch's layout.
        end: positions that the row holds.
        fields: contents in the order of positions, in `single_columns(columns, end)` columns; none for an empty row.

    Raises:
        UnsupportedCache: a form or layout without a single-row twin.
    """
    keys, values = _sides(form, fields)
    if isinstance(columns, LinearColumns):
        if isinstance(form, AffineForm):
            return QuantizedKVCache.from_state((keys, values, end, form.group_size, form.bits))
        if isinstance(form, PlainForm):
            return KVCache.from_state((keys, values, end))
    if isinstance(columns, ChunkedColumns):
        start = chunk_start(end, columns.chunk_size)
        return ChunkedKVCache.from_state((keys, values, end, columns.chunk_size, start))
    if isinstance(columns, RingColumns):
        head = min(end, columns.window)
        ring = (end, columns.keep, columns.window, head)
        if isinstance(form, AffineForm):
            return RotatingQuantizedKVCache.from_state((keys, values, *ring, form.group_size, form.bits))
        if isinstance(form, PlainForm):
            return RotatingKVCache.from_state((keys, values, *ring))
    raise UnsupportedCache(f"rows of {form.key} in {type(columns).__name__} have no single-row cache")


Side: TypeAlias = "mx.array | tuple[mx.array, ...] | None"


def single_columns(columns: Columns, end: int) -> int:
    """Return the columns of a row's single-row cache: up to a whole slab, a ring at most its window."""
    if isinstance(columns, ChunkedColumns):
        return slabs(end) - chunk_start(end, columns.chunk_size)
    return min(slabs(end), columns.window) if isinstance(columns, RingColumns) else slabs(end)


def _sides(form: StoredForm, fields: Fields) -> tuple[Side, Side]:
    if not fields:
        return None, None
    mx.eval(fields)
    keys, values = fields[: form.num_key_fields], fields[form.num_key_fields :]
    return (keys[0] if len(keys) == 1 else keys), (values[0] if len(values) == 1 else values)


def _as_fields(side: mx.array | tuple[mx.array, ...]) -> Fields:
    return (side,) if isinstance(side, mx.array) else tuple(side)
