"""The harmony format of gpt-oss: every message has a header that says who gets it."""

import re
from collections.abc import Callable

from headrace_http_api.parsing.grammar import CallContext
from headrace_http_api.parsing.json_calls import read_arguments
from headrace_http_api.parsing.outbox import CallWriter
from headrace_http_api.parsing.reader import Malformed, Steps, Unparsable, markers
from headrace_http_api.parsing.schemas import ToolTypes
from headrace_http_api.parsing.stepping import SteppingParser
from headrace_http_api.parsing.tool_parser import recover

__all__ = ["HarmonyParser"]

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_MAX_HEADER_CHARS = 512
_HEADS = markers(_START, _CHANNEL, _MESSAGE)
_BODY = markers(_MESSAGE)
_CLOSERS = ("<|end|>", "<|return|>", "<|call|>")
# A message without its end is ended by the next one's head.
_BODY_ENDS = markers(*_CLOSERS, _START, _CHANNEL)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_IS_REASONING = re.compile(r"\s*analysis\b")


class HarmonyParser(SteppingParser):
    """Messages to a function are calls, those of the channel `analysis` are reasoning, all others are content."""

    def __init__(self, tools: ToolTypes, id_factory: Callable[[], str]) -> None:
        super().__init__()
        writer = CallWriter(self._reader, self._outbox, id_factory, tools.by_tool)
        self._context = CallContext(self._reader, writer, tools)

    def _steps(self) -> Steps[None]:
        reader, writer = self._reader, self._context.writer
        while True:
            found = _HEADS.find(reader.text, reader.position)
            is_over = found is None and reader.has_ended
            stop = _HEADS.first_open(reader.text, reader.position) if found is None else found.start()
            stop = len(reader.text) if is_over else stop
            self._outbox.content(reader.text[reader.position : stop])
            reader.position = stop
            if is_over:
                return
            if found is None:
                yield
                continue
            reader.start_raw(stop)
            num_calls, length = writer.num_calls, len(found.group())
            try:
                yield from self._message(found.group())
            except Unparsable as failure:
                if not recover(self._context, failure) and reader.mark is not None:
                    begin = reader.mark
                    reader.position = begin + (length if writer.num_calls == num_calls else 0)
                    self._outbox.content(reader.text[begin : reader.position])
            reader.stop_raw()

    def _message(self, head: str) -> Steps[None]:
        reader, writer = self._reader, self._context.writer
        reader.position += len(head)
        header = "" if head == _MESSAGE else (yield from reader.until(_BODY, _MAX_HEADER_CHARS))[0]
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            writer.begin(self._context.writer.check(recipient.group(1).removeprefix("functions.")))
            yield from read_arguments(self._context)
            yield from reader.space()
            if not (yield from reader.accept_any(_CLOSERS)) and not (yield from self._is_at_head()):
                raise Malformed
            writer.end()
            return
        # A body is given out as it comes, so its header cannot become content any more.
        reader.stop_raw()
        header = header if head == _CHANNEL else header.partition(_CHANNEL)[2]
        deliver = self._outbox.reasoning if _IS_REASONING.match(header) else self._outbox.content
        yield from self._body(deliver)

    def _body(self, deliver: Callable[[str], None]) -> Steps[None]:
        reader = self._reader
        while True:
            found = _BODY_ENDS.find(reader.text, reader.position)
            is_over = found is None and reader.has_ended
            stop = _BODY_ENDS.first_open(reader.text, reader.position) if found is None else found.start()
            stop = len(reader.text) if is_over else stop
            deliver(reader.text[reader.position : stop])
            reader.position = stop
            if is_over:
                return
            if found is not None:
                reader.position += len(found.group()) if found.group() in _CLOSERS else 0
                return
            yield

    def _is_at_head(self) -> Steps[bool]:
        """Whether another message begins here, which is not taken."""
        for head in (_START, _CHANNEL):
            if (yield from self._reader.accept(head)):
                self._reader.position -= len(head)
                return True
        return False
