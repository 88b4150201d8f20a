"""Kinds of setting: what a value may be, as text (flags, environment) and as TOML."""

import re
from collections.abc import Sequence
from typing import Protocol

from attrs import frozen

__all__ = ["Choice", "Integer", "Kind", "Number", "Switch", "Text", "TextList", "from_texts", "from_toml"]

_INTEGER = re.compile(r"[+-]?[0-9]+")
_SWITCHES = {"true": True, "1": True, "false": False, "0": False}


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
        if text.lower() not in _SWITCHES:
            raise ValueError(text)
        return _SWITCHES[text.lower()]

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
    """Turn a TOML value into a value of the kind; what cannot be turned is returned for `accepts` to refuse."""
    return tuple(value) if kind.is_list and isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType]
