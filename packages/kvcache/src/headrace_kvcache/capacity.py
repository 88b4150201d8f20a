"""Capacity classes of slots: how many positions a row's slot is made for. Free of arrays."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from attrs import field, frozen

from headrace_kvcache.errors import InvalidGeometry

if TYPE_CHECKING:
    from collections.abc import Iterable

MIN_CAPACITY = 256


def power_of_two_at_least(count: int, *, least: int = 1) -> int:
    """Return the smallest power of two that holds `count`, at least `least`."""
    return max(least, 1 << max(0, count - 1).bit_length())


def _capacities(value: Iterable[int]) -> tuple[int, ...]:
    capacities = tuple(value)
    if not capacities or any(type(each) is not int or each < 1 for each in capacities):
        raise InvalidGeometry(f"capacities are {capacities!r}; they must be one or more integers of at least 1")
    if any(low >= high for low, high in itertools.pairwise(capacities)):
        raise InvalidGeometry(f"capacities are {capacities!r}; they must be strictly ascending")
    return capacities


@frozen(kw_only=True)
class CapacityClasses:
    """A row lives in the smallest class that holds it; beyond the last one listed, each class doubles the one before.

    A budget charges a row the whole capacity of its class, whatever the row holds.

    Attributes:
        capacities: positions per slot of the listed classes, ascending.

    Raises:
        InvalidGeometry: no capacity, one below 1, or an order that is not strictly ascending.
    """

    capacities: tuple[int, ...] = field(converter=_capacities, default=(1024, 4096))

    def index_for(self, num_tokens: int) -> int:
        """Return the index of the smallest class that holds `num_tokens` positions."""
        index = 0
        while self.capacity(index) < num_tokens:
            index += 1
        return index

    def capacity(self, index: int) -> int:
        """Return how many positions a slot of class `index` holds."""
        listed = self.capacities
        return listed[index] if index < len(listed) else listed[-1] << (index - len(listed) + 1)

    def capacity_for(self, num_tokens: int) -> int:
        """Return the capacity that a row of `num_tokens` positions is charged."""
        return self.capacity(self.index_for(num_tokens))

    def limited_to(self, limit: int) -> CapacityClasses:
        """Return the classes below `limit` and `limit` itself: a ring never holds more."""
        return CapacityClasses(capacities=(*(each for each in self.capacities if each < limit), limit))


DEFAULT_CLASSES = CapacityClasses()
