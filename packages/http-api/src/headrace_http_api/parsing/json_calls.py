"""Calls that are JSON objects with a name and arguments, alone or in a list, with or without markers around them."""

from attrs import define, frozen

from headrace_http_api.parsing.grammar import CallContext
from headrace_http_api.parsing.outbox import TextSink
from headrace_http_api.parsing.reader import Malformed, Steps
from headrace_http_api.parsing.values import JSON, MAX_DEPTH, ValueScanner, as_json

__all__ = ["JsonGrammar", "read_arguments", "read_call"]

_NAMES = frozenset({"name", "tool_name"})
_ARGUMENTS = frozenset({"arguments", "parameters"})
_OTHERS = frozenset({"type", "id", "tool_call_id"})


@frozen(kw_only=True)
class JsonGrammar:
    """Calls as JSON objects.

    Attributes:
        ends: texts that may end the calls.
        separators: texts that may stand between calls outside of a list.
        is_bare: without markers an object is only taken for a call if it has no keys but a call's.
    """

    openers: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()
    starts: str = ""
    dropped: tuple[str, ...] = ()
    is_bare: bool = False

    def read(self, context: CallContext, opener: str) -> Steps[None]:
        """See `CallGrammar.read`."""
        reader, writer = context.reader, context.writer
        yield from reader.space()
        is_list = opener.endswith("[") or (yield from reader.accept("["))
        while True:
            yield from read_call(context, is_bare=self.is_bare and not opener)
            if not (yield from (self._goes_on_in_list(context) if is_list else self._goes_on(context))):
                break
            writer.end()
        if self.ends and is_list:
            yield from reader.accept_after_space(*self.ends)
        writer.end()

    def _goes_on_in_list(self, context: CallContext) -> Steps[bool]:
        reader = context.reader
        yield from reader.space()
        if (yield from reader.accept("]")):
            return False
        yield from reader.expect(",")
        return True

    def _goes_on(self, context: CallContext) -> Steps[bool]:
        reader = context.reader
        found = yield from reader.accept_after_space(*self.ends, *self.separators, "{")
        if found == "{":
            reader.position -= 1
        return found == "{" or found in self.separators


@define
class _Fields:
    name: str | None = None
    arguments: str | None = None


def read_call(context: CallContext, *, is_bare: bool = False) -> Steps[None]:
    """Read one call object. The call is started, and not ended."""
    fields = _Fields()
    yield from context.reader.space()
    yield from _members(context, fields, is_bare=is_bare, depth=0)
    writer = context.writer
    if not writer.has_begun:
        # The arguments came before the name, or there are none.
        if fields.name is None or (is_bare and fields.arguments is None):
            raise Malformed
        writer.begin(fields.name)
        writer.write(fields.arguments or "{}")


def _members(context: CallContext, fields: _Fields, *, is_bare: bool, depth: int) -> Steps[None]:
    reader = context.reader
    if depth >= MAX_DEPTH:
        raise Malformed
    yield from reader.expect("{")
    is_first = True
    while True:
        yield from reader.space()
        if (yield from reader.accept("}")):
            return
        if not is_first:
            yield from reader.expect(",")
        key = yield from context.scanner().key()
        character = yield from reader.space()
        if key == "function" and character == "{":
            yield from _members(context, fields, is_bare=is_bare, depth=depth + 1)
        else:
            yield from _member(context, fields, key, is_bare=is_bare)
        is_first = False


def _member(context: CallContext, fields: _Fields, key: str, *, is_bare: bool) -> Steps[None]:
    is_begun = context.writer.has_begun
    if not is_begun and fields.name is None and (key in _NAMES or key == "function"):
        fields.name = context.writer.check((yield from context.scanner().string()))
    elif not is_begun and fields.arguments is None and key in _ARGUMENTS:
        if fields.name is None:
            fields.arguments = yield from _held_arguments(context)
        else:
            context.writer.begin(fields.name)
            yield from read_arguments(context)
    elif is_bare and key not in _OTHERS:
        raise Malformed
    else:
        yield from ValueScanner(context.reader, TextSink(), JSON).value()


def read_arguments(context: CallContext) -> Steps[None]:
    """Read the begun call's arguments: an object, or a string that holds one, or null."""
    if (yield from context.reader.space()) == "{":
        yield from context.scanner().value()
    else:
        context.writer.write((yield from _held_arguments(context)))


def _held_arguments(context: CallContext) -> Steps[str]:
    """Read arguments as a whole."""
    character = yield from context.reader.space()
    if character == '"':
        text = yield from context.scanner().string()
        arguments = as_json(text) if text.strip() else "{}"
    else:
        sink = TextSink()
        yield from ValueScanner(context.reader, sink, JSON).value()
        arguments = "{}" if sink.text == "null" else sink.text
    if arguments is None or not arguments.startswith("{"):
        raise Malformed
    return arguments
