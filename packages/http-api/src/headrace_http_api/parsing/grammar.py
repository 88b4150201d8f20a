"""What a family's call format is to the parser: where calls begin, and the steps that read them."""

from typing import Protocol

from attrs import frozen

from headrace_http_api.parsing.outbox import CallWriter
from headrace_http_api.parsing.reader import Reader, Steps
from headrace_http_api.parsing.schemas import ToolTypes
from headrace_http_api.parsing.values import JSON, Notation, ValueScanner

__all__ = ["CallContext", "CallGrammar"]


@frozen
class CallContext:
    """What the steps of a grammar work with."""

    reader: Reader
    writer: CallWriter
    tools: ToolTypes

    def scanner(self, notation: Notation = JSON) -> ValueScanner:
        """Return a scanner that writes the begun call's arguments."""
        return ValueScanner(self.reader, self.writer, notation)


class CallGrammar(Protocol):
    """One call format.

    Attributes:
        openers: texts that begin calls anywhere.
        starts: characters that may begin a call at the very start of a reply.
        dropped: texts around content that are no part of it.
    """

    @property
    def openers(self) -> tuple[str, ...]: ...

    @property
    def starts(self) -> str: ...

    @property
    def dropped(self) -> tuple[str, ...]: ...

    def read(self, context: CallContext, opener: str) -> Steps[None]:
        """Read the calls that follow an opener, which has been taken, up to the end of the calls.

        Raises `Unparsable` where the text is no call: what has not started comes back as content.
        """
        ...
