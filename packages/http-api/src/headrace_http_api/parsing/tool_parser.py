"""Splits text into content and calls, for any call format."""

from collections.abc import Callable

from headrace_http_api.parsing.grammar import CallContext, CallGrammar
from headrace_http_api.parsing.outbox import CallWriter
from headrace_http_api.parsing.parts import ContentDelta, Part
from headrace_http_api.parsing.reader import SPACE, Steps, Truncated, Unparsable, markers, space_before
from headrace_http_api.parsing.schemas import ToolTypes
from headrace_http_api.parsing.stepping import SteppingParser

__all__ = ["ToolParser", "recover"]

_MAX_LEADING_SPACE = 64


def recover(context: CallContext, failure: Unparsable) -> bool:
    """End a call that cannot be read further. Tell whether it had started; if not, its text is still to be read."""
    reader, writer = context.reader, context.writer
    if not writer.is_started:
        writer.abandon()
        return False
    if isinstance(failure, Truncated):
        reader.position = len(reader.text)
    writer.break_off()
    return True


class ToolParser(SteppingParser):
    """Finds calls; everything else is content.

    White space next to calls belongs to them, except between content before and after calls. A call whose text is
    malformed before its first argument is certain comes back as content; one that breaks later is closed, and the
    text from there on is content.
    """

    def __init__(self, grammar: CallGrammar, tools: ToolTypes, id_factory: Callable[[], str]) -> None:
        self._grammar = grammar
        self._marks = markers(*grammar.openers, *grammar.dropped)
        self._dropped = frozenset(grammar.dropped)
        self._first_characters = tuple({mark[0] for mark in (*grammar.openers, *grammar.dropped)})
        self._is_at_start = bool(grammar.starts)
        self._is_after_call = False
        self._has_content = False
        self._gap = ""
        self._is_plain = False
        super().__init__()
        writer = CallWriter(self._reader, self._outbox, id_factory, tools.by_tool)
        self._context = CallContext(self._reader, writer, tools)

    def push(self, text: str) -> list[Part]:
        """See `OutputParser.push`."""
        # Most text is content that nothing in it makes doubtful.
        if self._is_plain and text and text[-1] not in SPACE:
            for character in self._first_characters:
                if character in text:
                    break
            else:
                self._has_content = True
                return [ContentDelta(text)]
        return super().push(text)

    def _steps(self) -> Steps[None]:
        reader, writer = self._reader, self._context.writer
        while True:
            opener = yield from self._content()
            if opener is None:
                return
            num_calls, length = writer.num_calls, reader.position - (reader.mark or 0)
            try:
                yield from self._grammar.read(self._context, opener)
            except Unparsable as failure:
                if not recover(self._context, failure):
                    assert reader.mark is not None
                    # Calls before this one stand; without any, the opener was none.
                    begin, reader.position = reader.mark, reader.mark
                    if writer.num_calls == num_calls:
                        self._deliver(begin + length)
            reader.stop_raw()
            self._is_after_call = writer.num_calls > num_calls

    # ---- content ----------------------------------------------------------------------------------------------

    def _content(self) -> Steps[str | None]:
        """Deliver content up to an opener and take it; return it, or None at the end of the reply.

        All text from the white space before the opener on is remembered.
        """
        reader = self._reader
        while True:
            if self._is_after_call:
                yield from self._take_gap()
            if self._is_at_start:
                first = yield from self._first()
                self._is_at_start = False
                if first is not None and first in self._grammar.starts:
                    reader.start_raw(0)
                    return ""
            found = self._marks.find(reader.text, reader.position)
            if found is not None:
                begin = space_before(reader.text, reader.position, found.start())
                self._deliver(begin)
                reader.position = found.end()
                if found.group() not in self._dropped:
                    reader.start_raw(begin)
                    return found.group()
                self._is_after_call = True
                continue
            self._deliver(self._certain_end())
            if reader.has_ended:
                return None
            self._is_plain = reader.position == len(reader.text)
            yield
            self._is_plain = False

    def _certain_end(self) -> int:
        """Return up to where the text is content whatever comes."""
        reader = self._reader
        if reader.has_ended:
            return len(reader.text)
        return space_before(reader.text, reader.position, self._marks.first_open(reader.text, reader.position))

    def _deliver(self, end: int) -> None:
        """Give out text up to `end`, parted from earlier content by the white space that was between."""
        reader = self._reader
        if end > reader.position:
            self._outbox.content((self._gap if self._has_content else "") + reader.text[reader.position : end])
            self._has_content, self._gap = True, ""
        reader.position = end

    def _take_gap(self) -> Steps[None]:
        """Take the white space after a call."""
        reader, self._gap = self._reader, ""
        while True:
            end = reader.space_end()
            self._gap += reader.text[reader.position : end]
            reader.position = end
            if end < len(reader.text) or reader.has_ended:
                self._is_after_call = False
                return
            yield

    def _first(self) -> Steps[str | None]:
        """Go to the reply's first character that is no white space, and return it; white space before it is kept."""
        reader = self._reader
        while True:
            rest = reader.text.lstrip(SPACE)
            if rest or reader.has_ended or len(reader.text) > _MAX_LEADING_SPACE:
                break
            yield
        if not rest or len(reader.text) - len(rest) > _MAX_LEADING_SPACE:
            return None
        if rest[0] in self._grammar.starts:
            reader.position = len(reader.text) - len(rest)
        return rest[0]
