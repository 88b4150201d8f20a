"""Calls in tags, with each argument's text between tags of its own: XML in its variants, GLM and its relatives."""

import re

from attrs import frozen

from headrace_http_api.parsing.grammar import CallContext
from headrace_http_api.parsing.json_calls import read_arguments
from headrace_http_api.parsing.outbox import quoted
from headrace_http_api.parsing.reader import Malformed, Markers, Steps, markers
from headrace_http_api.parsing.schemas import argument_as_json
from headrace_http_api.parsing.values import STRING, Types

__all__ = ["PairGrammar", "XmlGrammar"]

_MAX_TAG_CHARS = 512
_TAG_END = markers(">")
_QUOTED_NAME = re.compile(r"""\s*(?:"([^"]+)"|'([^']+)'|([^\s"'<>=]+))""")
_IS_STRING = re.compile(r"""\bstring\s*=\s*["']?(true|false)""")
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"', "&apos;": "'"}
_CDATA, _CDATA_END = "<![CDATA[", markers("]]>")


@frozen(kw_only=True)
class XmlGrammar:
    """Calls in tags with the names in them.

    Attributes:
        wrapper: tags around the calls; they may be missing.
        call: beginning of the tag that a call starts with, up to the name.
        call_end: tag after a call.
        argument: beginning of the tag before an argument, up to the name.
        argument_end: tag after an argument.
        trims_lines: a line end right after and right before the argument's tags is no part of it.
        has_entities: arguments are written with XML's entities or as CDATA.
    """

    wrapper: tuple[str, str]
    call: str
    call_end: str
    argument: str
    argument_end: str
    trims_lines: bool = False
    has_entities: bool = False
    starts: str = ""
    dropped: tuple[str, ...] = ()

    @property
    def _value_end(self) -> Markers:
        ends = (self.argument_end, "\n" + self.argument_end) if self.trims_lines else (self.argument_end,)
        return markers(*ends, *(_ENTITIES if self.has_entities else ()))

    @property
    def openers(self) -> tuple[str, ...]:
        """See `CallGrammar`."""
        return tuple(opener for opener in (self.wrapper[0], self.call) if opener)

    def read(self, context: CallContext, opener: str) -> Steps[None]:
        """See `CallGrammar.read`."""
        reader, writer = context.reader, context.writer
        is_wrapped = opener != self.call
        if is_wrapped:
            yield from reader.space()
            yield from reader.expect(self.call)
        while True:
            yield from self._call(context)
            # Without its first tag a wrapper is closed all the same by some models.
            found = yield from reader.accept_after_space(self.call, *filter(None, self.wrapper[1:]))
            writer.end()
            if found != self.call:
                return

    def _call(self, context: CallContext) -> Steps[None]:
        reader, writer = context.reader, context.writer
        name = _name((yield from reader.until(_TAG_END, _MAX_TAG_CHARS))[0])
        writer.begin(name)
        if (yield from reader.space()) == "{":
            yield from read_arguments(context)
            yield from reader.space()
            yield from reader.expect(self.call_end)
            return
        writer.open("{", "}", is_held=True)
        is_first = True
        while not (yield from reader.accept(self.call_end)):
            yield from reader.expect(self.argument)
            tag = (yield from reader.until(_TAG_END, _MAX_TAG_CHARS))[0]
            key = _name(tag)
            writer.hold(("" if is_first else ", ") + quoted(key) + ": ")
            yield from self._value(context, _declared(tag, context.tools.of(name, key)))
            yield from reader.space()
            is_first = False
        writer.close()

    def _value(self, context: CallContext, types: Types) -> Steps[None]:
        reader, writer = context.reader, context.writer
        if self.trims_lines:
            yield from reader.accept("\n")
        if types == STRING:
            writer.open('"', '"')
            yield from self._text(context)
            writer.close()
        elif self.has_entities:
            pieces: list[str] = []
            yield from self._characters(context, pieces)
            writer.write(argument_as_json("".join(pieces), types))
        else:
            writer.write(argument_as_json((yield from reader.until(self._value_end))[0], types))

    def _text(self, context: CallContext) -> Steps[None]:
        """Stream a string's characters into the call."""
        if self.has_entities and (yield from self._is_cdata(context)):
            yield from context.reader.stream_until(_CDATA_END, context.writer.write_characters)
            yield from context.reader.space()
            yield from context.reader.expect(self.argument_end)
            return
        while True:
            end = yield from context.reader.stream_until(self._value_end, context.writer.write_characters)
            if end not in _ENTITIES:
                return
            context.writer.write_characters(_ENTITIES[end])

    def _characters(self, context: CallContext, pieces: list[str]) -> Steps[None]:
        """Collect an argument's characters."""
        reader = context.reader
        if (yield from self._is_cdata(context)):
            pieces.append((yield from reader.until(_CDATA_END))[0])
            yield from reader.space()
            yield from reader.expect(self.argument_end)
            return
        while True:
            text, end = yield from reader.until(self._value_end)
            pieces.append(text)
            if end not in _ENTITIES:
                return
            pieces.append(_ENTITIES[end])

    def _is_cdata(self, context: CallContext) -> Steps[bool]:
        return (yield from context.reader.accept(_CDATA))


def _name(tag: str) -> str:
    found = _QUOTED_NAME.match(tag)
    if found is None:
        raise Malformed
    return next(group for group in found.groups() if group)


def _declared(tag: str, types: Types) -> Types:
    """Return an argument's types: DeepSeek's tags say themselves whether it is a string."""
    declared = _IS_STRING.search(tag)
    if declared is None:
        return types
    if declared.group(1) == "true":
        return STRING
    return None if types is None or types == STRING else types - {"string"}


@frozen(kw_only=True)
class PairGrammar:
    """A call's name, and then keys and values in tags: GLM and LongCat."""

    opener: str
    end: str
    key: tuple[str, str]
    value: tuple[str, str]
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
        name, end = yield from reader.until(markers("\n", "{", self.key[0], self.end), _MAX_TAG_CHARS)
        reader.position -= len(end)
        writer.begin(name.strip())
        if (yield from reader.space()) == "{":
            yield from read_arguments(context)
            yield from reader.space()
            yield from reader.expect(self.end)
            writer.end()
            return
        writer.open("{", "}", is_held=True)
        is_first = True
        while not (yield from reader.accept(self.end)):
            yield from reader.expect(self.key[0])
            key = (yield from reader.until(markers(self.key[1]), _MAX_TAG_CHARS))[0].strip()
            yield from reader.space()
            yield from reader.expect(self.value[0])
            writer.hold(("" if is_first else ", ") + quoted(key) + ": ")
            yield from self._value(context, context.tools.of(name.strip(), key))
            yield from reader.space()
            is_first = False
        writer.close()
        writer.end()

    def _value(self, context: CallContext, types: Types) -> Steps[None]:
        reader, writer = context.reader, context.writer
        if types != STRING:
            writer.write(argument_as_json((yield from reader.until(markers(self.value[1])))[0], types))
            return
        writer.open('"', '"')
        yield from reader.stream_until(markers(self.value[1]), writer.write_characters)
        writer.close()
