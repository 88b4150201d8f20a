"""The call formats of model families, and how a chat template tells which one a checkpoint uses."""

# ruff: noqa: RUF001 - some families spell their tokens with such characters

from functools import lru_cache

from attrs import frozen

from headrace_http_api.parsing.gemma_calls import GemmaGrammar
from headrace_http_api.parsing.grammar import CallGrammar
from headrace_http_api.parsing.json_calls import JsonGrammar
from headrace_http_api.parsing.named_calls import DeepSeekGrammar, KimiGrammar, MistralGrammar
from headrace_http_api.parsing.python_calls import PythonGrammar
from headrace_http_api.parsing.tagged_calls import PairGrammar, XmlGrammar
from headrace_http_api.parsing.tool_format import ToolFormat
from headrace_http_api.parsing.values import GEMMA, gemma_notation

__all__ = ["FAMILIES", "ToolFamily", "find_family"]


@frozen(kw_only=True)
class ToolFamily:
    """One way to write calls.

    Attributes:
        name: what an override calls it.
        grammar: how calls are read; None for harmony, which has a parser of its own.
        marks: alternatives; a template that holds all texts of one of them is of this family.
        aliases: other names for overrides.
        tokens: texts that are special tokens in the family's vocabulary and must stay visible in what is parsed.
        tool_format: how a grammar writes a call; None where arguments are not JSON.
    """

    name: str
    grammar: CallGrammar | None
    marks: tuple[tuple[str, ...], ...] = ()
    aliases: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    tool_format: ToolFormat | None = None


def _json_list(opening: str, closing: str, *, name: str = "name", arguments: str = "arguments") -> ToolFormat:
    return ToolFormat(
        opening=f"{opening}[",
        before_name=f'{{"{name}": "',
        after_name=f'", "{arguments}": ',
        after_arguments="}",
        between=", ",
        closing=f"]{closing}",
    )


def _json_object(begin: str, end: str, *, arguments: str = "arguments", between: str = "\n") -> ToolFormat:
    return ToolFormat(
        before_name=f'{begin}{{"name": "',
        after_name=f'", "{arguments}": ',
        after_arguments=f"}}{end}",
        between=between,
    )


# The first that fits wins, so families with more particular marks come first.
FAMILIES: tuple[ToolFamily, ...] = (
    ToolFamily(
        name="harmony",
        aliases=("gpt_oss", "openai"),
        grammar=None,
        marks=(("<|channel|>", "<|message|>"),),
        tokens=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
        tool_format=ToolFormat(
            before_name="<|channel|>commentary to=functions.",
            after_name=" <|constrain|>json<|message|>",
            after_arguments="<|call|>",
            between="<|start|>assistant",
            is_json=False,
        ),
    ),
    ToolFamily(
        name="gemma4",
        grammar=GemmaGrammar(opener="<|tool_call>", end="<tool_call|>", notation=GEMMA),
        marks=(("<|tool_call>", "<tool_call|>"),),
        tokens=("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    ToolFamily(
        name="functiongemma",
        aliases=("function_gemma",),
        grammar=GemmaGrammar(
            opener="<start_function_call>", end="<end_function_call>", notation=gemma_notation("<escape>")
        ),
        marks=(("<start_function_call>",),),
        tokens=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    ToolFamily(
        name="minimax",
        aliases=("minimax_m2",),
        grammar=XmlGrammar(
            wrapper=("<minimax:tool_call>", "</minimax:tool_call>"),
            call="<invoke name=",
            call_end="</invoke>",
            argument="<parameter name=",
            argument_end="</parameter>",
        ),
        marks=(("<minimax:tool_call>",),),
        tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    ToolFamily(
        name="deepseek_v32",
        aliases=("dsml",),
        grammar=XmlGrammar(
            wrapper=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
            call="<｜DSML｜invoke name=",
            call_end="</｜DSML｜invoke>",
            argument="<｜DSML｜parameter name=",
            argument_end="</｜DSML｜parameter>",
        ),
        marks=(("｜DSML｜",),),
        tokens=("｜DSML｜",),
    ),
    ToolFamily(
        name="kimi",
        aliases=("kimi_k2",),
        grammar=KimiGrammar(),
        marks=(("<|tool_calls_section_begin|>",), ("<|im_middle|>",)),
        tokens=(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
        tool_format=ToolFormat(
            opening="<|tool_calls_section_begin|>",
            before_name="<|tool_call_begin|>functions.",
            after_name=":0<|tool_call_argument_begin|>",
            after_arguments="<|tool_call_end|>",
            closing="<|tool_calls_section_end|>",
            is_json=False,
        ),
    ),
    ToolFamily(
        name="deepseek_v3",
        aliases=("deepseek_r1",),
        grammar=DeepSeekGrammar(),
        marks=(("<｜tool▁calls▁begin｜>", "```json"),),
        tokens=(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
        tool_format=ToolFormat(
            opening="<｜tool▁calls▁begin｜>",
            before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            after_name="\n```json\n",
            after_arguments="\n```<｜tool▁call▁end｜>",
            between="\n",
            closing="<｜tool▁calls▁end｜>",
            is_json=False,
        ),
    ),
    ToolFamily(
        name="deepseek",
        aliases=("deepseek_v31",),
        grammar=DeepSeekGrammar(),
        marks=(("<｜tool▁calls▁begin｜>",),),
        tokens=(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
        tool_format=ToolFormat(
            opening="<｜tool▁calls▁begin｜>",
            before_name="<｜tool▁call▁begin｜>",
            after_name="<｜tool▁sep｜>",
            after_arguments="<｜tool▁call▁end｜>",
            closing="<｜tool▁calls▁end｜>",
            is_json=False,
        ),
    ),
    ToolFamily(
        name="command",
        aliases=("command_r7b", "cohere"),
        grammar=JsonGrammar(
            openers=("<|START_ACTION|>",),
            ends=("<|END_ACTION|>",),
            dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        ),
        marks=(("<|START_ACTION|>",),),
        tokens=(
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
            "<|START_TEXT|>",
            "<|END_TEXT|>",
        ),
        tool_format=_json_list("<|START_ACTION|>", "<|END_ACTION|>", name="tool_name", arguments="parameters"),
    ),
    ToolFamily(
        name="longcat",
        grammar=PairGrammar(
            opener="<longcat_tool_call>",
            end="</longcat_tool_call>",
            key=("<longcat_arg_key>", "</longcat_arg_key>"),
            value=("<longcat_arg_value>", "</longcat_arg_value>"),
        ),
        marks=(("<longcat_tool_call>",),),
        tokens=("<longcat_tool_call>", "</longcat_tool_call>"),
    ),
    ToolFamily(
        name="glm",
        aliases=("glm4", "glm45", "glm47", "laguna"),
        grammar=PairGrammar(
            opener="<tool_call>",
            end="</tool_call>",
            key=("<arg_key>", "</arg_key>"),
            value=("<arg_value>", "</arg_value>"),
        ),
        marks=(("<arg_key>",),),
        tokens=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    ToolFamily(
        name="minicpm",
        aliases=("minicpm5",),
        grammar=XmlGrammar(
            wrapper=("", ""),
            call="<function name=",
            call_end="</function>",
            argument="<param name=",
            argument_end="</param>",
            has_entities=True,
        ),
        marks=(("<function name=", "<param name="),),
    ),
    ToolFamily(
        name="seed",
        aliases=("seed_oss",),
        grammar=XmlGrammar(
            wrapper=("<seed:tool_call>", "</seed:tool_call>"),
            call="<function=",
            call_end="</function>",
            argument="<parameter=",
            argument_end="</parameter>",
            trims_lines=True,
        ),
        marks=(("seed:tool_call",),),
        tokens=("<seed:tool_call>", "</seed:tool_call>"),
    ),
    ToolFamily(
        name="qwen3_coder",
        aliases=("qwen_xml",),
        grammar=XmlGrammar(
            wrapper=("<tool_call>", "</tool_call>"),
            call="<function=",
            call_end="</function>",
            argument="<parameter=",
            argument_end="</parameter>",
            trims_lines=True,
        ),
        marks=(("<function=", "<parameter="),),
        tokens=("<tool_call>", "</tool_call>"),
    ),
    ToolFamily(
        name="lfm2",
        grammar=PythonGrammar(openers=("<|tool_call_start|>",), ends=("<|tool_call_end|>",), takes_json=True),
        marks=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    ToolFamily(
        name="mistral",
        grammar=MistralGrammar(),
        marks=(("[TOOL_CALLS]", "[ARGS]"),),
        tokens=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        tool_format=ToolFormat(before_name="[TOOL_CALLS]", after_name="[ARGS]", after_arguments="", is_json=False),
    ),
    ToolFamily(
        name="mistral_list",
        aliases=("mistral_nemo",),
        grammar=MistralGrammar(),
        marks=(("[TOOL_CALLS]",),),
        tokens=("[TOOL_CALLS]",),
        tool_format=_json_list("[TOOL_CALLS]", ""),
    ),
    ToolFamily(
        name="nemotron",
        grammar=JsonGrammar(openers=("<TOOLCALL>",), ends=("</TOOLCALL>",)),
        marks=(("<TOOLCALL>",),),
        tool_format=_json_list("<TOOLCALL>", "</TOOLCALL>"),
    ),
    ToolFamily(
        name="hermes",
        aliases=("json", "json_tools", "qwen", "qwen3", "smollm"),
        grammar=JsonGrammar(openers=("<tool_call>",), ends=("</tool_call>",)),
        marks=(("<tool_call>",),),
        tokens=("<tool_call>", "</tool_call>"),
        tool_format=_json_object("<tool_call>\n", "\n</tool_call>"),
    ),
    ToolFamily(
        name="phi",
        aliases=("phi4", "phi4_mini"),
        grammar=JsonGrammar(openers=("<|tool_call|>", "functools["), ends=("<|/tool_call|>", "</|tool_call|>")),
        marks=(("<|tool|>", "<|/tool|>"), ("functools[",)),
        tokens=("<|tool_call|>", "<|/tool_call|>"),
        tool_format=_json_object("<|tool_call|>", "<|/tool_call|>", between=""),
    ),
    ToolFamily(
        name="granite",
        grammar=JsonGrammar(openers=("<|tool_call|>",), starts="["),
        marks=(("<|tool_call|>",), ("<|start_of_role|>",)),
        tokens=("<|tool_call|>",),
        tool_format=_json_list("<|tool_call|>", ""),
    ),
    ToolFamily(
        name="llama_pythonic",
        aliases=("pythonic", "llama4_pythonic"),
        grammar=PythonGrammar(
            openers=("<|python_tag|>", "<|python_start|>"), ends=("<|python_end|>",), starts="[{", takes_json=True
        ),
        marks=(("func_name1(",), ("<|python_start|>",)),
        tokens=("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    ),
    ToolFamily(
        name="llama_json",
        aliases=("llama3", "llama3_json", "llama4_json"),
        grammar=JsonGrammar(openers=("<|python_tag|>",), starts="{[", separators=(";", ","), is_bare=True),
        marks=(("<|python_tag|>",), ("<|start_header_id|>", "parameters"), ("<|header_start|>", "parameters")),
        tokens=("<|python_tag|>",),
        tool_format=_json_object("", "", arguments="parameters", between="; "),
    ),
)

_BY_NAME = {name: family for family in FAMILIES for name in (family.name, *family.aliases)}


@lru_cache(maxsize=64)
def find_family(template_source: str, override: str | None = None) -> ToolFamily | None:
    """Return the family of a checkpoint with this chat template; None if it has no tools that are known.

    Args:
        override: a family's name or alias, or `none`.

    Raises:
        ValueError: `override` is neither.
    """
    if override is not None:
        family = _BY_NAME.get(override)
        if family is None and override != "none":
            names = ", ".join(sorted(_BY_NAME))
            raise ValueError(f"tool parser {override!r} is unknown: use none or one of {names}")
        return family
    for family in FAMILIES:
        if any(all(mark in template_source for mark in marks) for marks in family.marks):
            return family
    return None
