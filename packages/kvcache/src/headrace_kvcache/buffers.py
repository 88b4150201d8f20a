"""The buffers of one layer's slots, grown on demand and written in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_kvcache.capacity import MIN_CAPACITY, power_of_two_at_least
from headrace_kvcache.errors import InvalidGeometry

if TYPE_CHECKING:
    from headrace_kvcache.forms import Fields
    from headrace_kvcache.placement import Placement


def buffer_columns(needed: int, limit: int | None) -> int:
    """Return how many columns buffers get for rows of `needed` positions: a power of two from 256, at most `limit`."""
    columns = power_of_two_at_least(needed, least=MIN_CAPACITY)
    return columns if limit is None else max(needed, min(columns, limit))


class SlotBuffers:
    """Fields `(S, Hk, C, ...)` of one layer and one capacity class: S seats of C columns.

    Nothing is allocated before the first write. A buffer has one holder, this object: any other live reference
    or view turns the next write into a full copy.
    """

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields: Fields = ()

    def write(self, placement: Placement, added: Fields, *, size: tuple[int, int]) -> Fields:
        """Write each row's positions at its own place.

        Args:
            placement: where each row's positions go.
            added: fields `(B, Hk, T, ...)`.
            size: least number of seats and least number of columns that the buffers must have afterwards.

        Returns:
            The buffers, for reading in this step only.
        """
        self.reserve(added, size=size)
        placement.store(self.fields, added)
        return self.fields

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
    """All capacity classes of one layer.

    Attributes:
        classes: buffers by class index.
    """

    __slots__ = ("_geometry", "classes")

    def __init__(self) -> None:
        self.classes: dict[int, SlotBuffers] = {}
        self._geometry: tuple[tuple[int, int, mx.Dtype], ...] | None = None

    def of(self, class_index: int) -> SlotBuffers:
        """Return a class's buffers, empty ones if it has none."""
        found = self.classes.get(class_index)
        if found is None:
            found = self.classes[class_index] = SlotBuffers()
        return found

    def check(self, added: Fields) -> None:
        """Raise `InvalidGeometry` unless heads, sizes and dtypes are those of the layer's first append."""
        given = _geometry(added)
        if self._geometry is not None and self._geometry != given:
            raise InvalidGeometry(
                f"arrays of (heads, size, dtype) {given} do not fit a layer that holds {self._geometry}; one cache "
                f"holds one layer of one model"
            )

    def remember(self, added: Fields) -> None:
        """Keep the geometry that later appends must have."""
        if self._geometry is None:
            self._geometry = _geometry(added)

    def move(
        self, source: tuple[int, int], target: tuple[int, int], num_columns: int, *, size: tuple[int, int]
    ) -> None:
        """Copy the columns [0, `num_columns`) of a seat into another class and compute it at once.

        At once, because an unread view of the source would make the source's next write copy all of it.

        Args:
            source: class index and seat.
            target: class index and seat.
            num_columns: columns to copy.
            size: seats and columns that the target class must have.
        """
        held = self.of(source[0]).fields
        if not held or not num_columns:
            return
        room = self.of(target[0])
        room.reserve(held, size=size)
        for new, old in zip(room.fields, held, strict=True):
            new[target[1], :, :num_columns] = old[source[1], :, :num_columns]
        mx.eval(room.fields)

    def release(self, class_index: int) -> None:
        """Drop a class's buffers."""
        self.classes.pop(class_index, None)
        if not self.classes:
            self._geometry = None

    @property
    def arrays(self) -> list[mx.array]:
        """The buffers that exist now, class by class."""
        return [field for index in sorted(self.classes) for field in self.classes[index].fields]


def _geometry(fields: Fields) -> tuple[tuple[int, int, mx.Dtype], ...]:
    return tuple((field.shape[1], field.shape[3], field.dtype) for field in fields)


def _grown(buffer: mx.array, size: tuple[int, int]) -> mx.array:
    num_seats, num_heads, num_columns, head_dim = buffer.shape
    if num_seats >= size[0] and num_columns >= size[1]:
        return buffer
    shape = (max(num_seats, size[0]), num_heads, max(num_columns, size[1]), head_dim)
    grown = mx.zeros(shape, buffer.dtype)
    grown[:num_seats, :, :num_columns] = buffer
    return grown
