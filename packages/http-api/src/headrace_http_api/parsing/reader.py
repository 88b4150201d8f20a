"""Text that arrives in pieces, read by generators that pause until what they need is certain.

A parser's steps ask the reader for the next character, a literal or a text up to a marker. Where the answer could still
change with more text, they yield. So what is read never depends on how the text was cut.
"""

import re
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import TypeAlias, TypeVar

from attrs import define, field, frozen

__all__ = ["SPACE", "Malformed", "Markers", "Reader", "Steps", "Truncated", "Unparsable", "markers", "run_whole"]

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A part of a parser: yields when it needs more text, returns what it read."""

SPACE = " \t\r\n"
_SPACES = re.compile(f"[{SPACE}]*")
_MAX_SPACE = 64
"""White space that may belong to a marker after it is held back, but never more than this."""


class Unparsable(Exception):
    """The text does not go on as the format says."""


class Malformed(Unparsable):
    """The next character is wrong."""


class Truncated(Unparsable):
    """The text ended before what was needed."""


@frozen
class Markers:
    """A set of literal texts to look for; none starts another one."""

    literals: tuple[str, ...]
    _complete: re.Pattern[str]
    _unfinished: re.Pattern[str]

    def find(self, text: str, start: int) -> re.Match[str] | None:
        """Return the first complete marker at or after `start`."""
        return self._complete.search(text, start)

    def first_open(self, text: str, start: int) -> int:
        """Return where a marker may have begun that more text completes, or the length of `text`."""
        unfinished = self._unfinished.search(text, start)
        return len(text) if unfinished is None else unfinished.start()


@cache
def markers(*literals: str) -> Markers:
    """Compile markers, once for each set."""
    complete = re.compile("|".join(re.escape(literal) for literal in literals) or "(?!)")
    # Each proper beginning, up to the end of the text: <, <t, <to and so on.
    unfinished = "|".join(_beginnings(literal) for literal in literals) or "(?!)"
    return Markers(literals, complete, re.compile(rf"(?:{unfinished})\Z"))


def _beginnings(literal: str) -> str:
    pattern = ""
    for character in reversed(literal[1:-1]):
        pattern = f"(?:{re.escape(character)}{pattern})?"
    return re.escape(literal[0]) + pattern if len(literal) > 1 else "(?!)"


@define
class Reader:
    """The text that has not been disposed of yet, and where reading stands in it.

    Attributes:
        text: from the first character that may still be needed on.
        position: index of the next character in `text`.
        mark: index that reading may return to; text from here on is kept. None keeps nothing that was read.
        has_ended: no more text comes.
    """

    text: str = ""
    position: int = 0
    mark: int | None = None
    has_ended: bool = False
    _raw: list[str] = field(factory=list)
    _raw_start: int | None = None

    def feed(self, text: str) -> None:
        """Append text and forget what is no longer needed. Indices into `text` move, except the reader's own."""
        keep = self.position if self.mark is None else self.mark
        if self._raw_start is not None:
            self._raw.append(self.text[self._raw_start : keep])
            self._raw_start = 0
        self.text = self.text[keep:] + text
        self.position -= keep
        if self.mark is not None:
            self.mark = 0

    def start_raw(self, start: int) -> None:
        """Remember all text from index `start` on, and allow to return there."""
        self.mark = self._raw_start = start
        self._raw.clear()

    def take_raw(self) -> str:
        """Return the text remembered up to the position and start anew from there."""
        assert self._raw_start is not None
        self._raw.append(self.text[self._raw_start : self.position])
        raw = "".join(self._raw)
        self.start_raw(self.position)
        return raw

    def stop_raw(self) -> None:
        """Remember and keep nothing more."""
        self.mark = self._raw_start = None
        self._raw.clear()

    def space_end(self) -> int:
        """Return the index after the white space that comes next in the text there is."""
        space = _SPACES.match(self.text, self.position)
        assert space is not None
        return space.end()

    # ---- steps ------------------------------------------------------------------------------------------------

    def peek(self) -> Steps[str]:
        """Return the next character without taking it."""
        while self.position >= len(self.text):
            if self.has_ended:
                raise Truncated
            yield
        return self.text[self.position]

    def space(self) -> Steps[str]:
        """Take white space and return the character after it, which is not taken."""
        while True:
            if self.position < len(self.text):
                character = self.text[self.position]
                if character not in SPACE:
                    return character
                self.position += 1
            elif self.has_ended:
                raise Truncated
            else:
                yield

    def accept(self, literal: str) -> Steps[bool]:
        """Take `literal` if it comes next."""
        while True:
            if self.text.startswith(literal, self.position):
                self.position += len(literal)
                return True
            if not literal.startswith(self.text[self.position : self.position + len(literal)]):
                return False
            if self.has_ended:
                raise Truncated
            yield

    def accept_any(self, literals: Sequence[str]) -> Steps[bool]:
        """Take the first of `literals` that comes next, if any does."""
        for literal in literals:
            if (yield from self.accept(literal)):
                return True
        return False

    def accept_after_space(self, *literals: str) -> Steps[str | None]:
        """Take white space and the one of `literals` that comes after it; if none does, take nothing."""
        while True:
            start = self.space_end()
            for literal in literals:
                if self.text.startswith(literal, start):
                    self.position = start + len(literal)
                    return literal
            if not any(literal.startswith(self.text[start : start + len(literal)]) for literal in literals):
                return None
            if self.has_ended:
                raise Truncated
            yield

    def expect(self, literal: str) -> Steps[None]:
        """Take `literal`, which must come next."""
        if not (yield from self.accept(literal)):
            raise Malformed

    def run_of(self, pattern: re.Pattern[str], max_chars: int) -> Steps[str]:
        """Return the next characters that match `pattern`, maybe none, and take none of them.

        `pattern` matches any number of characters of one set. A longer run is malformed.
        """
        while True:
            run = pattern.match(self.text, self.position)
            assert run is not None
            if run.end() - run.start() > max_chars:
                raise Malformed
            if run.end() < len(self.text):
                return run.group()
            if self.has_ended:
                raise Truncated
            yield

    def take_run(self, pattern: re.Pattern[str], max_chars: int) -> Steps[str]:
        """Like `run_of`, but take the characters."""
        run = yield from self.run_of(pattern, max_chars)
        self.position += len(run)
        return run

    def until(self, ends: Markers, max_chars: int | None = None) -> Steps[tuple[str, str]]:
        """Take the text up to one of `ends` and the end itself; return both. A longer text is malformed."""
        offset = 0
        while True:
            found = ends.find(self.text, self.position + offset)
            stop = ends.first_open(self.text, self.position + offset) if found is None else found.start()
            if max_chars is not None and stop - self.position > max_chars:
                raise Malformed
            if found is not None:
                taken = self.text[self.position : stop]
                self.position = found.end()
                return taken, found.group()
            if self.has_ended:
                raise Truncated
            offset = stop - self.position
            yield

    def stream_until(self, ends: Markers, write: Callable[[str], None]) -> Steps[str]:
        """Like `until`, but hands the text to `write` in pieces as they become certain; returns the end.

        What may have been the beginning of an end when the text ended is not taken.
        """
        while True:
            found = ends.find(self.text, self.position)
            stop = ends.first_open(self.text, self.position) if found is None else found.start()
            piece = self.text[self.position : stop]
            self.position = stop
            if piece:
                write(piece)
            if found is not None:
                self.position += len(found.group())
                return found.group()
            if self.has_ended:
                raise Truncated
            yield


def space_before(text: str, start: int, end: int) -> int:
    """Return where the white space begins that belongs to a marker at `end`, not before `start`."""
    start = max(start, end - _MAX_SPACE)
    return start + len(text[start:end].rstrip(SPACE))


def run_whole(steps: Steps[T]) -> T:
    """Run steps over a reader that has ended, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value
