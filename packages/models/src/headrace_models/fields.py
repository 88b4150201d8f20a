"""Typed reading of a model's settings: every error names the file, the field, its value and what is expected."""

import math
from collections.abc import Mapping
from typing import cast

from attrs import frozen

from headrace_models.errors import SourceError

__all__ = ["Fields"]


@frozen
class Fields:
    """Settings out of one file. A JSON null counts as absent.

    Attributes:
        values: the settings.
        origin: the file they come from, for messages.
    """

    values: Mapping[str, object]
    origin: str

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def text(self, name: str, *, default: str | None = None) -> str:
        value = self._get(name, default, "a string")
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def flag(self, name: str, *, default: bool | None = None) -> bool:
        value = self._get(name, default, "true or false")
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def count(self, name: str, *, default: int | None = None) -> int:
        """Read an integer of at least 1."""
        value = self._get(name, default, "a positive integer")
        if type(value) is not int or value < 1:
            raise self._wrong(name, value, "a positive integer")
        return value

    def count_or_zero(self, name: str) -> int:
        """Read an integer of at least 0."""
        value = self._get(name, None, "an integer of at least 0")
        if type(value) is not int or value < 0:
            raise self._wrong(name, value, "an integer of at least 0")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        """Read a finite number."""
        value = self._get(name, default, "a finite number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(name, value, "a finite number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def optional_count(self, name: str) -> int | None:
        return self.count(name) if self.has(name) else None

    def token_ids(self, name: str) -> frozenset[int]:
        """Read one token id or a list of them; absent is the empty set."""
        value = self.values.get(name)
        if value is None:
            return frozenset()
        ids = cast("list[object]", value) if isinstance(value, list) else [value]
        if not all(type(item) is int and item >= 0 for item in ids):
            raise self._wrong(name, value, "a token id or a list of token ids")
        return frozenset(cast("list[int]", ids))

    def mapping(self, name: str) -> dict[str, object] | None:
        """Read a nested object; absent is None."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return cast("dict[str, object]", value)

    def _get(self, name: str, default: object, expected: str) -> object:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise SourceError(f"{self.origin} has no {name!r}; {expected} is expected: complete the file")
        return default

    def _wrong(self, name: str, value: object, expected: str) -> SourceError:
        return SourceError(f"{name!r} of {self.origin} is {value!r}; {expected} is expected: correct the file")
