"""The arrays that hold one row's keys and values, tokens on the second axis from the right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_kvcache.errors import InvalidGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_kvcache.forms import Fields

SLAB = 256


def slabs(num_tokens: int) -> int:
    """Return the positions of the whole slabs that hold `num_tokens`."""
    return -(-num_tokens // SLAB) * SLAB


def part(fields: Fields, start: int, stop: int) -> Fields:
    """Return views of the columns `[start, stop)`; new array objects also where that is everything."""
    if start == 0 and stop == fields[0].shape[2]:
        return fresh(fields)
    return tuple(field[..., start:stop, :] for field in fields)


def joined(parts: Sequence[Fields]) -> Fields:
    """Return the fields of several parts one after the other."""
    if len(parts) == 1:
        return parts[0]
    return tuple(mx.concatenate(list(pieces), axis=2) for pieces in zip(*parts, strict=True))


def fresh(fields: Fields) -> Fields:
    """Return new array objects of the same bytes: a slice write changes an array object for all of its holders."""
    # Indexing shares the bytes until one side is written; mx.array(field) would copy them at once.
    return tuple(field[...] for field in fields)


def with_room(fields: Fields | None, added: Fields, *, used: int, end: int, capacity: int) -> Fields:
    """Return fields with room for `end` columns, of which the first `used` are kept.

    Args:
        fields: what is held, or None for nothing yet.
        added: what will be written: its geometry.
        used: columns that hold something.
        end: columns needed.
        capacity: columns to have if the present ones do not suffice.
    """
    if fields is None:
        return tuple(mx.zeros((*new.shape[:2], capacity, new.shape[3]), new.dtype) for new in added)
    if fields[0].shape[2] >= end:
        return fields
    blank = tuple(mx.zeros((*new.shape[:2], capacity - used, new.shape[3]), new.dtype) for new in added)
    return joined([part(fields, 0, used), blank])


def write(fields: Fields, added: Fields, start: int) -> None:
    """Write `added` in place from column `start` on."""
    stop = start + added[0].shape[2]
    for field, new in zip(fields, added, strict=True):
        field[..., start:stop, :] = new


def num_bytes(fields: Fields | None) -> int:
    """Bytes of the arrays."""
    return 0 if fields is None else sum(field.nbytes for field in fields)


def check_pair(keys: mx.array, values: mx.array) -> None:
    """Raise `InvalidGeometry` unless the arrays are keys and values of the same positions, at least one."""
    key_shape, value_shape = keys.shape, values.shape
    if len(key_shape) != 4 or len(value_shape) != 4 or key_shape[:3] != value_shape[:3] or not key_shape[2]:
        raise InvalidGeometry(
            f"keys {keys.shape} and values {values.shape} do not fit each other: they must be (B, H, T, D) and "
            f"(B, H, T, Dv) with T at least 1"
        )


def check_same_layer(fields: Fields | None, added: Fields, keys: mx.array, values: mx.array) -> None:
    """Raise `InvalidGeometry` unless `added` has the rows, heads, sizes and dtypes of what is held."""
    if fields is None:
        return
    for field, new in zip(fields, added, strict=True):
        held, given = field.shape, new.shape
        if held[:2] != given[:2] or held[3] != given[3] or field.dtype != new.dtype:
            raise InvalidGeometry(
                f"keys {keys.shape} and values {values.shape} in {keys.dtype} do not fit a cache of {held[0]} "
                f"rows and {held[1]} heads that holds other sizes or another dtype; one cache holds one layer "
                f"of one model"
            )
