"""Calls as Python writes them: `[name(key=value, ...), ...]`."""

import re

from attrs import frozen

from headrace_http_api.parsing.grammar import CallContext
from headrace_http_api.parsing.json_calls import JsonGrammar
from headrace_http_api.parsing.outbox import quoted
from headrace_http_api.parsing.reader import Steps
from headrace_http_api.parsing.values import PYTHON

__all__ = ["PythonGrammar"]

_MAX_NAME_CHARS = 256
_NAME = re.compile(r"[\w.\-]*")
_KEY = re.compile(r"\w*")


@frozen(kw_only=True)
class PythonGrammar:
    """Calls in a list.

    Attributes:
        ends: texts that may end the list.
        takes_json: whether a JSON object in the list's place is a call too.
    """

    openers: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    starts: str = ""
    dropped: tuple[str, ...] = ()
    takes_json: bool = False

    def read(self, context: CallContext, opener: str) -> Steps[None]:
        """See `CallGrammar.read`."""
        reader, writer = context.reader, context.writer
        if (yield from reader.space()) == "{" and self.takes_json:
            bare = JsonGrammar(ends=self.ends, separators=(";",), is_bare=not opener)
            yield from bare.read(context, opener)
            return
        yield from reader.expect("[")
        while True:
            yield from _call(context)
            yield from reader.space()
            if (yield from reader.accept("]")):
                break
            yield from reader.expect(",")
            writer.end()
            yield from reader.space()
        if self.ends:
            yield from reader.accept_after_space(*self.ends)
        writer.end()


def _call(context: CallContext) -> Steps[None]:
    reader, writer, scanner = context.reader, context.writer, context.scanner(PYTHON)
    yield from reader.space()
    name = yield from reader.take_run(_NAME, _MAX_NAME_CHARS)
    yield from reader.expect("(")
    writer.begin(name)
    writer.open("{", "}", is_held=True)
    is_first = True
    while True:
        yield from reader.space()
        if (yield from reader.accept(")")):
            break
        if not is_first:
            yield from reader.expect(",")
            yield from reader.space()
            if (yield from reader.accept(")")):
                break
        key = yield from reader.take_run(_KEY, _MAX_NAME_CHARS)
        yield from reader.space()
        yield from reader.expect("=")
        writer.hold(("" if is_first else ", ") + quoted(key) + ": ")
        # As values depth 1: the outermost brace is the call's.
        yield from scanner.value(context.tools.of(name, key), depth=1)
        is_first = False
    writer.close()
