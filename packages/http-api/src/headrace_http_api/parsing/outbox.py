"""Where a parser's steps put what they found: parts in order, and the calls with their arguments."""

import json
from collections.abc import Callable, Container
from typing import Protocol

from attrs import define, field

from headrace_http_api.parsing.parts import (
    ContentDelta,
    Part,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from headrace_http_api.parsing.reader import Malformed, Reader

__all__ = ["CallWriter", "Outbox", "Sink", "TextSink", "quoted"]


def quoted(text: str) -> str:
    """Return `text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


class Sink(Protocol):
    """Takes a JSON value piece by piece."""

    def hold(self, text: str) -> None:
        """Add text that only counts if more is written: a comma and a key before their value."""
        ...

    def write(self, text: str) -> None:
        """Add text that is certain."""
        ...

    def open(self, text: str, closer: str, *, is_held: bool = False) -> None:
        """Begin an object, array or string that `closer` will end."""
        ...

    def close(self) -> None:
        """End what was opened last."""
        ...


@define
class TextSink:
    """Collects a value."""

    pieces: list[str] = field(factory=list)
    _closers: list[str] = field(factory=list)

    def hold(self, text: str) -> None:
        self.pieces.append(text)

    write = hold

    def open(self, text: str, closer: str, *, is_held: bool = False) -> None:  # noqa: ARG002 - nothing is streamed
        self.pieces.append(text)
        self._closers.append(closer)

    def close(self) -> None:
        self.pieces.append(self._closers.pop())

    @property
    def text(self) -> str:
        """The value so far."""
        return "".join(self.pieces)


@define
class Outbox:
    """Parts that wait to be returned; neighbouring argument pieces become one delta."""

    _parts: list[Part] = field(factory=list)
    _index: int = 0
    _pieces: list[str] = field(factory=list)

    def content(self, text: str) -> None:
        """Add text of the answer."""
        if text:
            self.add(ContentDelta(text))

    def reasoning(self, text: str) -> None:
        """Add text of the reasoning."""
        if text:
            self.add(ReasoningDelta(text))

    def arguments(self, index: int, text: str) -> None:
        """Add arguments of call `index`."""
        if text:
            self._index = index
            self._pieces.append(text)

    def add(self, part: Part) -> None:
        """Add a part."""
        self._join()
        self._parts.append(part)

    def take(self) -> list[Part]:
        """Return what was added since the last time."""
        self._join()
        parts, self._parts = self._parts, []
        return parts

    def _join(self) -> None:
        if self._pieces:
            self._parts.append(ToolArgumentsDelta(self._index, "".join(self._pieces)))
            self._pieces.clear()


@define
class CallWriter:
    """Writes calls into an outbox. A call counts from its first certain argument on; before, it can be abandoned.

    Whatever was opened and not closed can be closed at any moment, so arguments are always valid JSON.

    Attributes:
        num_calls: calls that have begun to count.
        has_begun: a call was begun and neither ended nor abandoned.
        is_started: the begun call counts.
    """

    _reader: Reader
    _outbox: Outbox
    _id_factory: Callable[[], str]
    _names: Container[str]
    num_calls: int = 0
    has_begun: bool = False
    is_started: bool = False
    _name: str = ""
    _id: str | None = None
    _held: str = ""
    _closers: list[str] = field(factory=list)
    _ids: set[str] = field(factory=set)

    def check(self, name: str) -> str:
        """Return `name`, which must be a tool of the request."""
        if name not in self._names:
            raise Malformed
        return name

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begin a call of a tool of the request. An id that this reply has used already is replaced."""
        self._name, self._id = self.check(name), call_id
        self._held = ""
        self._closers.clear()
        self.has_begun, self.is_started = True, False

    def hold(self, text: str) -> None:
        self._held += text

    def write(self, text: str) -> None:
        if not self.is_started:
            self._start()
        self._outbox.arguments(self.num_calls - 1, self._held + text)
        self._held = ""

    def write_characters(self, text: str) -> None:
        """Add characters of the string that is open."""
        self.write(quoted(text)[1:-1])

    def open(self, text: str, closer: str, *, is_held: bool = False) -> None:
        if is_held:
            self.hold(text)
        else:
            self.write(text)
        self._closers.append(closer)

    def close(self) -> None:
        self.write(self._closers.pop())

    def end(self) -> None:
        """End a call whose arguments are whole, up to where the reader stands. None written means no arguments."""
        if not self.is_started:
            self.write("{}")
        self._end(is_complete=True)

    def break_off(self) -> None:
        """End a started call as it is, closing what is open."""
        is_complete = not self._closers
        self._outbox.arguments(self.num_calls - 1, "".join(reversed(self._closers)))
        self._end(is_complete=is_complete)

    def abandon(self) -> None:
        """Forget a call that has not started."""
        self.has_begun = False

    def _start(self) -> None:
        self.is_started = True
        # From here on the call cannot be taken back, so nothing has to be kept to be given out as content.
        self._reader.mark = None
        self._outbox.add(ToolCallStart(self.num_calls, self._fresh_id(), self._name))
        self.num_calls += 1

    def _end(self, *, is_complete: bool) -> None:
        self._outbox.add(ToolCallEnd(self.num_calls - 1, is_complete, self._reader.take_raw()))
        self.has_begun = self.is_started = False

    def _fresh_id(self) -> str:
        call_id = self._id if self._id and self._id not in self._ids else self._id_factory()
        while call_id in self._ids:
            call_id = f"{call_id}-{self.num_calls}"
        self._ids.add(call_id)
        return call_id
