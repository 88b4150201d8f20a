"""Whether arrays and numbers that came from a file can be the state of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_kvcache.errors import CacheFileError
from headrace_kvcache.forms import AffineForm
from headrace_kvcache.turbo import TurboForm

if TYPE_CHECKING:
    from headrace_kvcache.forms import Fields, StoredForm
    from headrace_kvcache.stored import Side, StoredCache

_FLOATS = frozenset({mx.float32, mx.bfloat16, mx.float16})
_ELEMENTS = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_TURBO_GROUP = 32


def check_fields(cache: StoredCache, keys: Side, values: Side, *, least: int) -> int:
    """Check keys and values against the form of the cache that was made of them, and return how many columns they have.

    They must be what the form gives for plain keys and values of some head sizes: the number of arrays, their rows,
    heads, sizes and dtypes. Nothing is computed for it.

    Args:
        cache: made of them.
        keys, values: `(B, H, C, ...)` each, or both None for a cache that holds nothing.
        least: the fewest columns that there must be.

    Raises:
        CacheFileError: they are something else.
        InvalidGeometry, InvalidScheme: a head size that the form does not store.
    """
    if cache.offset < 0 or (keys is None) != (values is None):
        raise CacheFileError("it holds keys without values, or a negative number of positions", "damaged")
    if keys is None or values is None:
        if cache.offset:
            raise CacheFileError(f"it holds nothing of {cache.offset} positions", "damaged")
        return 0
    key_fields, value_fields = _fields(keys), _fields(values)
    fields = (*key_fields, *value_fields)
    if any(each.ndim != 4 for each in fields) or len({each.shape[:3] for each in fields}) != 1:
        raise CacheFileError("its keys and values are not arrays (B, H, C, ...) of the same positions", "damaged")
    rows, heads, columns, _ = fields[0].shape
    if columns < max(least, 1) or not rows or not heads:
        raise CacheFileError(f"its keys have the shape {fields[0].shape} and must hold {least} positions", "damaged")
    expected = _encoded(cache.form, key_fields, value_fields, rows=rows, heads=heads)
    if [(each.shape[3], each.dtype) for each in expected] != [(each.shape[3], each.dtype) for each in fields]:
        raise CacheFileError(f"its arrays do not have the sizes and dtypes of {cache.form.key}", "damaged")
    return columns


def check_ring_columns(columns: int, offset: int, keep: int, max_size: int, head: int) -> None:
    """Check where a ring of so many columns has its newest position.

    Raises:
        CacheFileError: there it cannot be.
    """
    if head == offset:
        fits = columns >= offset
    else:
        fits = max_size <= columns <= offset and keep < head <= columns and (columns == max_size or head == columns)
    if not fits:
        raise CacheFileError(
            f"a ring of {columns} columns cannot hold {offset} positions with the newest in column {head - 1}",
            "damaged",
        )


def _encoded(form: StoredForm, keys: Fields, values: Fields, *, rows: int, heads: int) -> Fields:
    """Return what the form makes of one position, lazily."""
    if isinstance(form, AffineForm):
        sizes = (keys[1].shape[3] * form.group_size, values[1].shape[3] * form.group_size)
        dtype = keys[1].dtype
    elif isinstance(form, TurboForm):
        sizes = (keys[1].shape[3] * _TURBO_GROUP, values[1].shape[3] * _TURBO_GROUP)
        dtype = _ELEMENTS[form.element_type or "float32"]
    else:
        sizes, dtype = (keys[0].shape[3], values[0].shape[3]), keys[0].dtype
    if dtype not in _FLOATS or not all(sizes):
        raise CacheFileError(f"it holds {dtype} in heads of {sizes}", "damaged")
    key, value = (mx.zeros((rows, heads, 1, size), dtype) for size in sizes)
    form.check(key, value)
    return form.encode(key, value)


def _fields(side: mx.array | tuple[mx.array, ...]) -> Fields:
    return (side,) if isinstance(side, mx.array) else side
