"""Kinds of setting: what a value may be, as text (flags, environment) and as TOML."""

import re
from collections.abc import Sequence
from typing import Protocol

from attrs import frozen

_INTEGER = re.compile(r"[+-]?[0-9]+")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgtKMGT]?)(?:i?[bB])?")


class Kind(Protocol):
    """The values that a setting may take."""

    @property
    def allowed(self) -> str:
        """The allowed values, in words that follow "it must be"."""
        ...

    @property
    def is_list(self) -> bool:
        """Whether a flag may be repeated and a variable holds values separated by commas."""
        ...

    def parse(self, text: str) -> object:
        """Turn one text into a value; raises ValueError when it is none. Ranges are left to `accepts`."""
        ...

    def accepts(self, value: object) -> bool:
        """Tell whether a typed value may be used."""
        ...


@frozen
class Text:
    """Any text but the empty one."""

    allowed: str = "a text of at least one character"
    is_list: bool = False

    def parse(self, text: str) -> object:
        return text

    def accepts(self, value: object) -> bool:
        return isinstance(value, str) and value != ""


@frozen
class TextList:
    """A tuple of texts, none of them empty."""

    allowed: str = "a list of texts of at least one character each"
    is_list: bool = True

    def parse(self, text: str) -> object:
        return text.strip()

    def accepts(self, value: object) -> bool:
        return isinstance(value, tuple) and all(isinstance(item, str) and item != "" for item in value)


@frozen
class Switch:
    """On or off."""

    allowed: str = "true or false"
    is_list: bool = False

    def parse(self, text: str) -> object:
        lowered = text.lower()
        if lowered not in {"true", "false", "1", "0"}:
            raise ValueError(text)
        return lowered in {"true", "1"}

    def accepts(self, value: object) -> bool:
        return type(value) is bool


@frozen
class Integer:
    """An integer within bounds, both included."""

    low: int
    high: int
    is_list: bool = False

    @property
    def allowed(self) -> str:
        return f"an integer from {self.low} to {self.high}"

    def parse(self, text: str) -> object:
        if not _INTEGER.fullmatch(text):
            raise ValueError(text)
        return int(text)

    def accepts(self, value: object) -> bool:
        return type(value) is int and self.low <= value <= self.high


@frozen
class Number:
    """A number within bounds, both included; never NaN."""

    low: float
    high: float
    is_list: bool = False

    @property
    def allowed(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}"

    def parse(self, text: str) -> object:
        return float(text)

    def accepts(self, value: object) -> bool:
        return type(value) in {int, float} and self.low <= value <= self.high  # type: ignore[operator]


@frozen
class Size:
    """A number of bytes, with K, M, G or T for powers of 1024."""

    low: int = 0
    is_list: bool = False

    @property
    def allowed(self) -> str:
        least = f", at least {self.low}" if self.low else ""
        return f"a number of bytes such as 512M or 2G{least}"

    def parse(self, text: str) -> object:
        found = _SIZE.fullmatch(text.strip())
        if found is None:
            raise ValueError(text)
        return int(float(found[1]) * 1024 ** " kmgt".index(found[2].lower() or " "))

    def accepts(self, value: object) -> bool:
        return type(value) is int and value >= self.low


@frozen
class Pattern:
    """A text of a given form.

    Attributes:
        expression: regular expression that the whole text matches.
        allowed: the form, in words that follow "it must be".
    """

    expression: str
    allowed: str
    is_list: bool = False

    def parse(self, text: str) -> object:
        return text

    def accepts(self, value: object) -> bool:
        return isinstance(value, str) and re.fullmatch(self.expression, value) is not None


@frozen
class Choice:
    """One of a few words."""

    words: tuple[str, ...]
    is_list: bool = False

    @property
    def allowed(self) -> str:
        return "one of " + ", ".join(self.words)

    def parse(self, text: str) -> object:
        return text

    def accepts(self, value: object) -> bool:
        return value in self.words


def from_texts(kind: Kind, texts: Sequence[str]) -> object:
    """Turn what a flag or a variable holds into a value of the kind.

    Raises:
        ValueError: when a text is no value of this kind. Ranges are left to `accepts`.
    """
    if kind.is_list:
        return tuple(kind.parse(text) for text in texts)
    (text,) = texts
    return kind.parse(text)


def from_toml(kind: Kind, value: object) -> object:
    """Turn a TOML value into a value of the kind: arrays become tuples, texts with units numbers.

    What cannot be turned is returned as it is, for `accepts` to refuse.
    """
    if isinstance(kind, Size) and isinstance(value, str):
        return kind.parse(value) if _SIZE.fullmatch(value.strip()) else value
    return tuple(value) if kind.is_list and isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType]
