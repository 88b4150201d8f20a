"""The parser of one reply, chosen from the checkpoint's template."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace_http_api.parsing.families import find_family
from headrace_http_api.parsing.harmony import HarmonyParser
from headrace_http_api.parsing.parts import ContentDelta, OutputParser, Part
from headrace_http_api.parsing.reasoning import REASONING_FORMATS, ReasoningSplitter, find_reasoning_format
from headrace_http_api.parsing.schemas import tool_types
from headrace_http_api.parsing.tool_parser import ToolParser

__all__ = ["select_parser", "visible_tokens"]

_THINK = next(entry for entry in REASONING_FORMATS if entry.name == "think")


def make_call_id() -> str:
    """Return a fresh id in OpenAI's shape."""
    return f"call_{uuid.uuid4().hex[:24]}"


def select_parser(
    template_source: str,
    *,
    override: str | None = None,
    reasoning_override: str | None = None,
    starts_in_reasoning: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    id_factory: Callable[[], str] = make_call_id,
) -> OutputParser:
    """Return a fresh parser for one reply.

    Args:
        template_source: the checkpoint's chat template; empty if it has none.
        override: a tool family's name instead of what the template tells, or `none`.
        reasoning_override: a reasoning format's name instead of what the template tells, or `none`: then all reasoning
            stays in the content as it was written.
        starts_in_reasoning: the prompt has opened reasoning that the reply goes on with.
        tools: the request's tools. Without any nothing is a call; calls of other tools are content.
        id_factory: returns a fresh id for each call; it is not asked where the family has ids that it depends on.

    Raises:
        ValueError: an override is unknown.
    """
    family = find_family(template_source, override)
    types = tool_types(tools or ())
    if family is not None and family.grammar is None:
        return HarmonyParser(types, id_factory)
    reasoning = find_reasoning_format(template_source, reasoning_override)
    if reasoning is None and starts_in_reasoning and reasoning_override is None:
        reasoning = _THINK
    splitter = None if reasoning is None else ReasoningSplitter(reasoning, starts_inside=starts_in_reasoning)
    # Without tools, what surrounds a family's answers is still no part of them.
    grammar = None if family is None else family.grammar
    needs_calls = grammar is not None and (bool(types.by_tool) or bool(grammar.dropped))
    calls = ToolParser(grammar, types, id_factory) if grammar is not None and needs_calls else None
    return ReplyParser(splitter, calls)


def visible_tokens(
    template_source: str, *, override: str | None = None, reasoning_override: str | None = None
) -> frozenset[str]:
    """Return the texts that the parser must see, should they be special tokens that decoding leaves out.

    Raises:
        ValueError: an override is unknown.
    """
    family = find_family(template_source, override)
    reasoning = find_reasoning_format(template_source, reasoning_override)
    tokens = () if family is None else family.tokens
    return frozenset(tokens) if reasoning is None else frozenset((*tokens, *reasoning.tokens))


class ReplyParser:
    """Reasoning first, calls in what is left: what looks like a call within reasoning is none."""

    def __init__(self, splitter: ReasoningSplitter | None, calls: ToolParser | None) -> None:
        self._splitter = splitter
        self._calls = calls

    def push(self, text: str) -> list[Part]:
        """See `OutputParser.push`."""
        if not text:
            return []
        if self._splitter is None or self._splitter.is_plain:
            return [ContentDelta(text)] if self._calls is None else self._calls.push(text)
        return self._with_calls(self._splitter.push(text))

    def flush(self) -> list[Part]:
        """See `OutputParser.flush`."""
        parts = [] if self._splitter is None else self._with_calls(self._splitter.flush())
        return parts if self._calls is None else [*parts, *self._calls.flush()]

    def _with_calls(self, parts: list[Part]) -> list[Part]:
        if self._calls is None:
            return parts
        found: list[Part] = []
        for part in parts:
            if isinstance(part, ContentDelta):
                found += self._calls.push(part.text)
            else:
                found.append(part)
        return found
