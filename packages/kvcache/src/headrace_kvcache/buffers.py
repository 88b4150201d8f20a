"""The buffers of one layer's slots, grown on demand and written in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx

from headrace_kvcache.capacity import MIN_CAPACITY, power_of_two_at_least
from headrace_kvcache.errors import InvalidGeometry

if TYPE_CHECKING:
    from headrace_kvcache.forms import Fields
    from headrace_kvcache.slots import Room

# Heads, size and dtype of each field.
Geometry: TypeAlias = "tuple[tuple[int, int, mx.Dtype], ...]"


def buffer_columns(needed: int, limit: int | None) -> int:
    """Return how many columns buffers get for rows of `needed` positions: a power of two from 256, at most `limit`."""
    columns = power_of_two_at_least(needed, least=MIN_CAPACITY)
    return columns if limit is None else max(needed, min(columns, limit))


class SlotBuffers:
    """Fields `(S, Hk, C, ...)` of one layer and one room: S seats of C columns.

    Nothing is allocated before the first write. A buffer has one holder, this object: any other live reference
    or view turns the next write into a full copy.
    """

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields: Fields = ()

    def reserve(self, like: Fields, *, size: tuple[int, int]) -> None:
        """Make room for `size` seats and columns of fields of the heads, sizes and dtypes of `like`."""
        if not self.fields:
            self.fields = tuple(mx.zeros((size[0], each.shape[1], size[1], each.shape[3]), each.dtype) for each in like)
        else:
            self.fields = tuple(_grown(field, size) for field in self.fields)

    def release(self) -> None:
        """Drop the buffers; steps in flight keep what they still read."""
        self.fields = ()

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return sum(field.nbytes for field in self.fields)


class LayerBuffers:
    """All buffers of one layer, by stored form and capacity class.

    Attributes:
        rooms: buffers by (index of the stored form, index of the capacity class).
    """

    __slots__ = ("_geometry", "rooms")

    def __init__(self) -> None:
        self.rooms: dict[Room, SlotBuffers] = {}
        self._geometry: dict[int, Geometry] = {}

    def of(self, room: Room) -> SlotBuffers:
        """Return a room's buffers, empty ones if it has none."""
        found = self.rooms.get(room)
        if found is None:
            found = self.rooms[room] = SlotBuffers()
        return found

    def check(self, form: int, added: Fields) -> None:
        """Raise `InvalidGeometry` unless heads, sizes and dtypes are those of the form's first append."""
        held, given = self._geometry.get(form), _geometry(added)
        if held is not None and held != given:
            raise InvalidGeometry(
                f"arrays of (heads, size, dtype) {given} do not fit a layer that holds {held}; one cache holds one "
                f"layer of one model"
            )

    def remember(self, form: int, added: Fields) -> None:
        """Keep the geometry that later appends must have."""
        self._geometry.setdefault(form, _geometry(added))

    def release(self, room: Room) -> None:
        """Drop a room's buffers."""
        self.rooms.pop(room, None)
        if not self.rooms:
            self._geometry.clear()

    @property
    def arrays(self) -> list[mx.array]:
        """The buffers that exist now, room by room."""
        return [field for room in sorted(self.rooms) for field in self.rooms[room].fields]


def _geometry(fields: Fields) -> Geometry:
    return tuple((field.shape[1], field.shape[3], field.dtype) for field in fields)


def _grown(buffer: mx.array, size: tuple[int, int]) -> mx.array:
    num_seats, num_heads, num_columns, head_dim = buffer.shape
    if num_seats >= size[0] and num_columns >= size[1]:
        return buffer
    # One pass over the result, where zeros and a slice write would take two.
    if num_columns < size[1]:
        blank = mx.zeros((num_seats, num_heads, size[1] - num_columns, head_dim), buffer.dtype)
        buffer = mx.concatenate([buffer, blank], axis=2)
    if num_seats < size[0]:
        blank = mx.zeros((size[0] - num_seats, *buffer.shape[1:]), buffer.dtype)
        buffer = mx.concatenate([buffer, blank])
    return buffer
