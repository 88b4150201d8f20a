"""Calls with the name in front and JSON arguments after it: Mistral, Kimi and DeepSeek."""

# ruff: noqa: RUF001 - some families spell their tokens with such characters

import re

from attrs import frozen

from headrace_http_api.parsing.grammar import CallContext
from headrace_http_api.parsing.json_calls import JsonGrammar, read_arguments
from headrace_http_api.parsing.reader import Malformed, Steps, markers

__all__ = ["DeepSeekGrammar", "KimiGrammar", "MistralGrammar"]

MAX_HEADER_CHARS = 512

_MISTRAL_NAME = re.compile(r"[\w.\-]*")


@frozen
class MistralGrammar:
    """`[TOOL_CALLS]` and then a JSON list, or `name[ARGS]{...}`, also with `[CALL_ID]` in between."""

    openers: tuple[str, ...] = ("[TOOL_CALLS]",)
    starts: str = ""
    dropped: tuple[str, ...] = ()

    def read(self, context: CallContext, opener: str) -> Steps[None]:  # noqa: ARG002 - there is only one
        """See `CallGrammar.read`."""
        reader, writer = context.reader, context.writer
        if (yield from reader.space()) in "[{":
            yield from JsonGrammar().read(context, opener="")
            return
        while True:
            name = yield from reader.take_run(_MISTRAL_NAME, MAX_HEADER_CHARS)
            if (yield from reader.space()) == "[":
                if (yield from reader.accept("[CALL_ID]")):
                    yield from reader.take_run(_MISTRAL_NAME, MAX_HEADER_CHARS)
                yield from reader.expect("[ARGS]")
            writer.begin(name)
            yield from read_arguments(context)
            writer.end()
            # Names go on without another marker in some templates; text that is no name is content.
            yield from reader.accept_after_space("[TOOL_CALLS]")
            yield from reader.space()


_KIMI_SECTIONS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_KIMI_SECTION_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
_KIMI_CALL = "<|tool_call_begin|>"
_KIMI_HEADER_END = markers("<|tool_call_argument_begin|>")
_KIMI_HEADER = re.compile(r"(?:functions\.)?(?P<name>[^\s:]+)(?::[0-9]+)?")


@frozen
class KimiGrammar:
    """Sections of calls with headers like `functions.name:0`.

    The header is the call's id, because the template writes the id back and the model finds the name in it.
    """

    openers: tuple[str, ...] = (*_KIMI_SECTIONS, _KIMI_CALL)
    starts: str = ""
    dropped: tuple[str, ...] = ()

    def read(self, context: CallContext, opener: str) -> Steps[None]:
        """See `CallGrammar.read`."""
        reader, writer = context.reader, context.writer
        if opener != _KIMI_CALL:
            yield from reader.space()
            yield from reader.expect(_KIMI_CALL)
        while True:
            header = (yield from reader.until(_KIMI_HEADER_END, MAX_HEADER_CHARS))[0].strip()
            found = _KIMI_HEADER.fullmatch(header)
            if found is None:
                raise Malformed
            is_id = header.startswith("functions.") and ":" in header
            writer.begin(found["name"], header if is_id else None)
            yield from read_arguments(context)
            yield from reader.space()
            yield from reader.expect("<|tool_call_end|>")
            found = yield from reader.accept_after_space(_KIMI_CALL, *_KIMI_SECTION_ENDS)
            writer.end()
            if found != _KIMI_CALL:
                return


_DEEPSEEK_CALLS = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_CALL_END = "<｜tool▁call▁end｜>"
_DEEPSEEK_CALLS_END = "<｜tool▁calls▁end｜>"
_DEEPSEEK_HEAD_END = markers("<｜tool▁sep｜>")
_LINE_END = markers("\n")
_FENCE = "```"


@frozen
class DeepSeekGrammar:
    """Sections of calls as `name SEP {...}` (V3.1), or as `function SEP name` and a fenced JSON block (V3, R1)."""

    openers: tuple[str, ...] = (_DEEPSEEK_CALLS, _DEEPSEEK_CALL)
    starts: str = ""
    dropped: tuple[str, ...] = ()

    def read(self, context: CallContext, opener: str) -> Steps[None]:
        """See `CallGrammar.read`."""
        reader, writer = context.reader, context.writer
        if opener != _DEEPSEEK_CALL:
            yield from reader.space()
            yield from reader.expect(_DEEPSEEK_CALL)
        while True:
            yield from _deepseek_call(context)
            found = yield from reader.accept_after_space(_DEEPSEEK_CALL, _DEEPSEEK_CALLS_END)
            writer.end()
            if found != _DEEPSEEK_CALL:
                return


def _deepseek_call(context: CallContext) -> Steps[None]:
    reader, writer = context.reader, context.writer
    head = (yield from reader.until(_DEEPSEEK_HEAD_END, MAX_HEADER_CHARS))[0].strip()
    is_fenced = (yield from reader.space()) != "{"
    if is_fenced:
        head = (yield from reader.until(_LINE_END, MAX_HEADER_CHARS))[0].strip()
        yield from reader.space()
        yield from reader.expect(_FENCE)
        yield from reader.until(_LINE_END, MAX_HEADER_CHARS)
    writer.begin(head)
    yield from read_arguments(context)
    yield from reader.space()
    if is_fenced:
        yield from reader.expect(_FENCE)
        yield from reader.space()
    yield from reader.expect(_DEEPSEEK_CALL_END)
