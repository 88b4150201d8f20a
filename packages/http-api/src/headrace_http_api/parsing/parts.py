"""What a reply is made of, in the order in which it was written: plain data, and the protocol of what makes it."""

from collections.abc import Iterable
from typing import Protocol, TypeAlias

from attrs import frozen

__all__ = [
    "ContentDelta",
    "OutputParser",
    "ParsedReply",
    "Part",
    "ReasoningDelta",
    "ToolArgumentsDelta",
    "ToolCall",
    "ToolCallEnd",
    "ToolCallStart",
    "collect",
    "parse_all",
]


@frozen
class ContentDelta:
    """The next piece of the answer's text; never empty."""

    text: str


@frozen
class ReasoningDelta:
    """The next piece of the text that the model thought with; never empty."""

    text: str


@frozen
class ToolCallStart:
    """A call begins. Until its `ToolCallEnd` only its arguments follow.

    Attributes:
        index: place among the reply's calls, from 0.
        id: no other call of this reply has it.
        name: the tool, whole.
    """

    index: int
    id: str
    name: str


@frozen
class ToolArgumentsDelta:
    """The next piece of a call's arguments. All pieces together are one JSON object."""

    index: int
    text: str


@frozen
class ToolCallEnd:
    """A call is over, and its arguments are a JSON object.

    Attributes:
        index: as in `ToolCallStart`.
        is_complete: False if the model's text broke off or was malformed within the arguments. They then hold what was
            certain until there, closed.
        raw: the call's text as the model wrote it, markup included.
    """

    index: int
    is_complete: bool
    raw: str


Part: TypeAlias = ContentDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd


class OutputParser(Protocol):
    """Splits one reply's text. How the text is cut into pushes changes nothing but the size of the deltas."""

    def push(self, text: str) -> list[Part]:
        """Take the next text and return what it made certain. Never raises on any text."""
        ...

    def flush(self) -> list[Part]:
        """End the reply and return all that was held back. Call it once; nothing can be pushed after it."""
        ...


@frozen
class ToolCall:
    """A whole call.

    Attributes:
        arguments: a JSON object as text.
        is_complete: see `ToolCallEnd`.
    """

    id: str
    name: str
    arguments: str
    is_complete: bool


@frozen
class ParsedReply:
    """A whole reply."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]


def parse_all(parser: OutputParser, text: str) -> ParsedReply:
    """Split a whole reply with a fresh parser: the same as joining what it streams."""
    return collect([*parser.push(text), *parser.flush()])


def collect(parts: Iterable[Part]) -> ParsedReply:
    """Join the parts of a whole reply."""
    content: list[str] = []
    reasoning: list[str] = []
    starts: list[ToolCallStart] = []
    arguments: list[list[str]] = []
    completeness: list[bool] = []
    for part in parts:
        match part:
            case ContentDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case ToolCallStart():
                starts.append(part)
                arguments.append([])
            case ToolArgumentsDelta(index, text):
                arguments[index].append(text)
            case ToolCallEnd(_, is_complete, _):
                completeness.append(is_complete)
    calls = (
        ToolCall(id=start.id, name=start.name, arguments="".join(pieces), is_complete=is_complete)
        for start, pieces, is_complete in zip(starts, arguments, completeness, strict=True)
    )
    return ParsedReply("".join(content), "".join(reasoning), tuple(calls))
