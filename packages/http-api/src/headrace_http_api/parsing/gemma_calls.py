"""Calls of the Gemma models: `call:name{key:value,...}` with a delimiter of its own around strings."""

import re

from attrs import frozen

from headrace_http_api.parsing.grammar import CallContext
from headrace_http_api.parsing.reader import Malformed, Steps, markers
from headrace_http_api.parsing.values import Notation

__all__ = ["GemmaGrammar"]

_MAX_NAME_CHARS = 256
_NAME = re.compile(r"[\w.\-]+")
_NAME_END = markers("{")


@frozen(kw_only=True)
class GemmaGrammar:
    """One call between two markers.

    Attributes:
        notation: how arguments are written.
    """

    opener: str
    end: str
    notation: Notation
    starts: str = ""
    dropped: tuple[str, ...] = ()

    @property
    def openers(self) -> tuple[str, ...]:
        """See `CallGrammar`."""
        return (self.opener,)

    def read(self, context: CallContext, opener: str) -> Steps[None]:  # noqa: ARG002 - there is only one
        """See `CallGrammar.read`."""
        reader, writer = context.reader, context.writer
        yield from reader.space()
        yield from reader.expect("call:")
        name = (yield from reader.until(_NAME_END, _MAX_NAME_CHARS))[0].strip()
        reader.position -= 1
        if not _NAME.fullmatch(name):
            raise Malformed
        writer.begin(name)
        yield from context.scanner(self.notation).value()
        yield from reader.space()
        yield from reader.expect(self.end)
        writer.end()
