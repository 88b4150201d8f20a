"""What a chat's reply must match and how it is read: response formats, forced calls, reasoning and its budget."""

from collections.abc import Callable, Sequence
from functools import partial

from attrs import evolve, frozen

from headrace_http_api.chat_request import ChatRequest
from headrace_http_api.errors import InvalidRequest
from headrace_http_api.parsing.families import ToolFamily, find_family
from headrace_http_api.parsing.parts import OutputParser, Part, ToolArgumentsDelta, ToolCallEnd, ToolCallStart
from headrace_http_api.parsing.reasoning import find_reasoning_format
from headrace_http_api.parsing.selection import select_parser
from headrace_http_api.parsing.tool_format import ToolFormat
from headrace_http_api.tool_fields import Tool
from headrace_sampling import GrammarSpec, GrammarTag

__all__ = ["ReplyShape", "reply_shape"]

# How calls are written where a family has no form that a grammar can write.
_COMMON_FAMILY = "hermes"
_THINK_END = "</think>"


@frozen(kw_only=True)
class ReplyShape:
    """What a reply must match, and how it is read.

    Attributes:
        grammar: None for free text.
        param: the field that asked for the grammar.
        new_parser: makes what splits one reply into parts; None takes all of it for content.
    """

    grammar: GrammarSpec | None
    param: str | None
    new_parser: Callable[[], OutputParser] | None


def reply_shape(template_source: str, request: ChatRequest, *, starts_in_reasoning: bool) -> ReplyShape:
    """Find the shape of a request's replies.

    Args:
        template_source: the model's chat template.
        starts_in_reasoning: the prompt has opened reasoning that the reply goes on with.

    Raises:
        InvalidRequest: a thinking budget where nothing is thought by the prompt's will.
        InvalidGrammar: a tool's schema is too long.
    """
    family = find_family(template_source)
    override: str | None = None
    param, grammar = None, None
    asked = request.asked_grammar()
    if asked is not None:
        param, grammar = asked.param, asked.spec
    elif request.must_call:
        if _writable(family) is None:
            override = _COMMON_FAMILY
            family = find_family(template_source, override)
        param, grammar = "tool_choice", _forced_calls(_writable(family), family, request)
    elif any(tool.is_strict for tool in request.usable_tools):
        param, grammar = "tools", _strict_calls(family, request)
    if starts_in_reasoning:
        param, grammar = _after_reasoning(grammar, param, _reasoning_end(template_source), request.budget)
    elif request.budget is not None and request.thinks is not False and find_reasoning_format(template_source):
        raise InvalidRequest(
            f"{request.budget_name} is {request.budget}, and this prompt opens no reasoning: whether it thinks is left "
            "to the model; leave it out, or switch thinking on if the model's template can",
            param=request.budget_name,
        )
    new_parser = _parser_maker(template_source, override, request, starts_in_reasoning=starts_in_reasoning)
    return ReplyShape(grammar=grammar, param=param, new_parser=new_parser)


# ---- grammars ------------------------------------------------------------------------------------------------


def _writable(family: ToolFamily | None) -> ToolFormat | None:
    # A family without a call grammar is read by special tokens, which no grammar over text can write.
    return None if family is None or family.grammar is None else family.tool_format


def _forced_calls(form: ToolFormat | None, family: ToolFamily | None, request: ChatRequest) -> GrammarSpec:
    assert form is not None, "the common family has a form"
    can_repeat = request.parallel_tool_calls is not False and not form.opening and not form.closing
    return GrammarSpec.structural_tag(
        _tags(form, request.callable_tools),
        triggers=[_trigger(form, family)],
        allows_text=False,
        between=form.between if can_repeat else None,
    )


def _strict_calls(family: ToolFamily | None, request: ChatRequest) -> GrammarSpec | None:
    form = _writable(family)
    if form is None:
        return None
    return GrammarSpec.structural_tag(_tags(form, request.usable_tools), triggers=[_trigger(form, family)])


def _tags(form: ToolFormat, tools: Sequence[Tool]) -> list[GrammarTag]:
    return [
        GrammarTag(begin=form.begin(tool.name), content=GrammarSpec.json_schema(tool.parameters), end=form.end)
        for tool in tools
    ]


def _trigger(form: ToolFormat, family: ToolFamily | None) -> str:
    """Return what leads into a call: alone it may be one special token."""
    tokens = () if family is None else family.tokens
    return next((token for token in tokens if form.trigger.startswith(token)), form.trigger)


def _reasoning_end(template_source: str) -> str:
    reasoning = find_reasoning_format(template_source)
    return _THINK_END if reasoning is None else reasoning.ends[0]


def _after_reasoning(
    grammar: GrammarSpec | None, param: str | None, end: str, budget: int | None
) -> tuple[str | None, GrammarSpec | None]:
    if grammar is not None:
        grammar = evolve(grammar, free_until=end)
        return param, grammar if budget is None else grammar.limited(budget)
    if budget is None:
        return param, None
    return "thinking_budget", GrammarSpec.any_text(free_until=end, free_limit=budget)


# ---- parsers -------------------------------------------------------------------------------------------------


def _parser_maker(
    template_source: str, override: str | None, request: ChatRequest, *, starts_in_reasoning: bool
) -> Callable[[], OutputParser] | None:
    tools = [tool.described for tool in request.usable_tools]
    family = find_family(template_source, override)
    surrounds = family is not None and (family.grammar is None or bool(family.grammar.dropped))
    if not (tools or surrounds or starts_in_reasoning or find_reasoning_format(template_source)):
        return None
    make = partial(
        select_parser, template_source, override=override, starts_in_reasoning=starts_in_reasoning, tools=tools
    )
    return make if request.parallel_tool_calls is not False else partial(_first_call_only, make)


def _first_call_only(make: Callable[[], OutputParser]) -> OutputParser:
    return _FirstCall(make())


@frozen
class _FirstCall:
    """Drops all calls but the first."""

    inner: OutputParser

    def push(self, text: str) -> list[Part]:
        return self._kept(self.inner.push(text))

    def flush(self) -> list[Part]:
        return self._kept(self.inner.flush())

    def _kept(self, parts: list[Part]) -> list[Part]:
        calls = (ToolCallStart, ToolArgumentsDelta, ToolCallEnd)
        return [part for part in parts if not (isinstance(part, calls) and part.index)]
