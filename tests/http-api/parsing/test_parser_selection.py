"""Which family a chat template tells, what overrides do, what a grammar needs, what must stay visible."""

import json
from pathlib import Path

import pytest

from headrace_http_api.parsing.families import FAMILIES, find_family
from headrace_http_api.parsing.parts import parse_all
from headrace_http_api.parsing.selection import select_parser, visible_tokens

# ruff: noqa: RUF001 - some families spell their tokens with such characters

TOOLS = [
    {"type": "function", "function": {"name": "look_up", "parameters": {"properties": {"q": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "list-all"}},
]

# Own minimal fixtures in the manner of each family's template, not the text of a released model.
TEMPLATES = {
    "harmony": "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}",
    "gemma4": "{{ '<|tool_call>call:' + f.name + '{' + a + '}<tool_call|>' }}{{ '<|channel>thought\\n<channel|>' }}",
    "functiongemma": "<start_function_declaration><start_function_call>call:",
    "minimax": '{% set begin = \'<minimax:tool_call>\' %}<invoke name="{{ f.name }}"><parameter name="{{ k }}">',
    "deepseek_v32": "{% set dsml_token = '｜DSML｜' %}<{{ dsml_token }}function_calls>",
    "kimi": "{{ '<|im_assistant|>assistant<|im_middle|>' }}",
    "deepseek_v3": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + t + '<｜tool▁sep｜>' + n + '\\n```json\\n' }}",
    "deepseek": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + n + '<｜tool▁sep｜>' + a }}",
    "command": "Action: write <|START_ACTION|> and a list <|START_THINKING|> <|START_RESPONSE|>",
    "longcat": "<longcat_tool_call>{{ n }}<longcat_arg_key>",
    "glm": "<tool_call>{{ n }}<arg_key>{{ k }}</arg_key>",
    "minicpm": '<function name="{{ n }}"><param name="{{ k }}">',
    "seed": "{% set toolcall_begin_token = '<seed:tool_call>' %}<function={{ n }}>",
    "qwen3_coder": "{{ '<tool_call>\\n<function=' + n + '>\\n<parameter=' + k + '>\\n' }}",
    "lfm2": '{{ "<|tool_call_start|>[" + calls + "]<|tool_call_end|>" }}',
    "mistral": "{{ '[TOOL_CALLS]' + n + '[ARGS]' + a }}",
    "mistral_list": "{{ '[TOOL_CALLS] [' + calls + ']' }}",
    "nemotron": "<TOOLCALL>[{{ calls }}]</TOOLCALL>",
    "hermes": '{{ \'<tool_call>\\n{"name": "\' + tool_call.name }}',
    "phi": "{{ '<|tool|>' + tools + '<|/tool|>' }}",
    "granite": "{{ '<|start_of_role|>tools<|end_of_role|>' + tools }}",
    "llama_pythonic": "[func_name1(params_name1=params_value1), func_name2(params)] <|start_header_id|> parameters",
    "llama_json": '<|start_header_id|> {"name": function name, "parameters": dictionary of argument name and value}',
}


def test_each_family_has_a_template():
    """No family is only reached by its name."""
    assert set(TEMPLATES) == {family.name for family in FAMILIES}


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_the_template_tells_the_family(family):
    """Each family's marks lead to it, past those of its relatives."""
    assert find_family(TEMPLATES[family]).name == family


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("mistral", "mistral_list"),
        ("llama3", "llama_json"),
        ("granite", "granite"),
        ("gemma3", None),
        ("minicpm", None),
    ],
)
def test_fixtures_of_the_codec(file, expected):
    """The template fixtures that the codec is tested with lead to their family, or to none without tools."""
    path = Path(__file__).parents[2] / "models" / "templates" / f"{file}.jinja"
    if not path.exists():
        pytest.skip("the codec's fixtures are not here")
    found = find_family(path.read_text())

    assert (found.name if found else None) == expected


def test_overrides():
    """Names and aliases win over the template, `none` turns tools off, others are refused with the known ones."""
    call = '<tool_call>{"name": "look_up", "arguments": {"q": "x"}}</tool_call>'

    assert find_family(TEMPLATES["glm"], "qwen").name == "hermes"
    assert parse_all(select_parser("", override="json", tools=TOOLS), call).tool_calls[0].name == "look_up"
    assert parse_all(select_parser(TEMPLATES["hermes"], override="none", tools=TOOLS), call).content == call
    with pytest.raises(ValueError, match=r"tool parser 'hermse' is unknown: use none or one of .*hermes"):
        select_parser("", override="hermse")


def test_names_and_aliases_are_unique():
    """An override means one family."""
    names = [name for family in FAMILIES for name in (family.name, *family.aliases)]

    assert len(names) == len(set(names))
    assert "none" not in names


@pytest.mark.parametrize("family", [family.name for family in FAMILIES if family.tool_format])
def test_what_a_grammar_writes_is_read(family):
    """A call of the family's format, alone and with another, is what its parser takes for one."""
    form = find_family("", family).tool_format
    arguments = '{"q": "a \\"b\\" é"}'
    alone = form.begin("look_up") + arguments + form.end
    reply = parse_all(select_parser("", override=family, tools=TOOLS), alone)
    two = form.render([("look_up", arguments), ("list-all", "{}")])

    assert form.begin("look_up").startswith(form.trigger)
    assert form.render([("look_up", arguments)]) == alone
    assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == [
        ("look_up", json.loads(arguments))
    ]
    assert reply.content == ""
    found = parse_all(select_parser("", override=family, tools=TOOLS), two).tool_calls
    assert [call.name for call in found] == ["look_up", "list-all"]


def test_formats_that_no_json_grammar_can_write():
    """Families whose arguments are no JSON say so."""
    without = {family.name for family in FAMILIES if family.tool_format is None}

    assert without >= {"qwen3_coder", "glm", "llama_pythonic", "gemma4", "minimax"}
    assert not without & {"hermes", "mistral", "llama_json", "harmony", "kimi", "granite", "command", "phi"}


def test_tokens_that_must_stay_visible():
    """Those of the family and of its reasoning."""
    assert {"<|tool_call>", '<|"|>', "<|channel>", "<channel|>"} <= visible_tokens(TEMPLATES["gemma4"])
    assert "<|channel|>" in visible_tokens(TEMPLATES["harmony"])
    assert visible_tokens("") == frozenset()


def test_ids():
    """Ids come from the factory and differ; Kimi's own are kept while they are fresh."""
    call = '<tool_call>{"name": "list-all", "arguments": {}}</tool_call>'
    same = parse_all(select_parser("", override="hermes", tools=TOOLS, id_factory=lambda: "x"), call * 3)
    fresh = parse_all(select_parser("", override="hermes", tools=TOOLS), call * 2)
    begin, middle, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    text = "".join(f"{begin}functions.list-all:{number}{middle}{{}}{end}" for number in (3, 4, 4))
    kimi = parse_all(select_parser("", override="kimi", tools=TOOLS, id_factory=lambda: "x"), text)

    assert len({one.id for one in same.tool_calls}) == 3
    assert all(one.id.startswith("call_") for one in fresh.tool_calls)
    assert [one.id for one in kimi.tool_calls] == ["functions.list-all:3", "functions.list-all:4", "x"]


def test_answers_of_command_without_tools():
    """What surrounds an answer is no part of it, with or without tools."""
    text = "<|START_RESPONSE|>Hello there.<|END_RESPONSE|>"

    assert parse_all(select_parser(TEMPLATES["command"]), text).content == "Hello there."


def test_harmony_tells_channels_apart():
    """Analysis is reasoning, a preamble and the final message are content, a call within analysis text is none."""
    text = (
        '<|channel|>analysis<|message|>Maybe to=functions.look_up {"q": "x"}?<|end|>'
        "<|start|>assistant<|channel|>commentary<|message|>I look. <|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"q": "x"}<|call|>'
        "<|start|>assistant to=functions.list-all<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>Done."
    )
    for pieces in ([text], list(text)):
        parser = select_parser("", override="harmony", tools=TOOLS)
        parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
        reply = parse_all(select_parser("", override="harmony", tools=TOOLS), text)
        assert reply.reasoning == 'Maybe to=functions.look_up {"q": "x"}?'
        assert reply.content == "I look. Done."
        assert [call.name for call in reply.tool_calls] == ["look_up", "list-all"]
        assert parts


def test_harmony_gives_back_what_it_cannot_read():
    """A call of an unknown tool, and text outside of messages, are content; nothing of it is lost."""
    call = '<|channel|>commentary to=functions.rm <|constrain|>json<|message|>{"q": "x"}<|call|>'
    reply = parse_all(select_parser("", override="harmony", tools=TOOLS), call)

    assert '{"q": "x"}' in reply.content
    assert reply.tool_calls == ()
    assert parse_all(select_parser("", override="harmony", tools=TOOLS), "plain <|chan").content == "plain <|chan"
