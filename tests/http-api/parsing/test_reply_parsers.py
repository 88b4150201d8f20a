"""Laws of the reply parsers, for every family: chunking, round trips, truncation, malformed calls, and an oracle."""

import importlib
import itertools
import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace_http_api.parsing.families import FAMILIES
from headrace_http_api.parsing.parts import (
    ContentDelta,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    collect,
    parse_all,
)
from headrace_http_api.parsing.selection import select_parser

# ruff: noqa: RUF001 - some families spell their tokens with such characters

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "items": {"type": "array"},
    "options": {"type": "object"},
    "free": {},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "search", "parameters": {"properties": PROPERTIES}}},
]
FAMILY_NAMES = [family.name for family in FAMILIES]


def make_parser(family, *, reasoning="think", starts_in_reasoning=False, tools=TOOLS):
    numbers = itertools.count()
    return select_parser(
        "",
        override=family,
        reasoning_override=reasoning,
        starts_in_reasoning=starts_in_reasoning,
        tools=tools,
        id_factory=lambda: f"call_{next(numbers)}",
    )


def parse(family, text, **options):
    return parse_all(make_parser(family, **options), text)


def parts_of(parser, pieces):
    return [*itertools.chain.from_iterable(parser.push(piece) for piece in pieces), *parser.flush()]


def merged(parts):
    """Parts with neighbouring deltas of one kind joined: what must not depend on chunking."""
    result = []
    for part in parts:
        last = result[-1] if result else None
        joins = isinstance(part, ContentDelta | ReasoningDelta | ToolArgumentsDelta) and type(part) is type(last)
        if joins and isinstance(part, ToolArgumentsDelta):
            assert part.index == last.index
            result[-1] = ToolArgumentsDelta(part.index, last.text + part.text)
        elif joins:
            result[-1] = type(part)(last.text + part.text)
        else:
            result.append(part)
    return result


# ---- writers: how each family's template writes calls, independent of what the package knows --------------------


def xml_value(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def gemma_value(value, quote):
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(entry, quote)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma_value(entry, quote) for entry in value) + "]"
    return json.dumps(value)


def json_objects(begin, end, joint, arguments="arguments"):
    def write(calls):
        return joint.join(
            begin + json.dumps({"name": name, arguments: values}, ensure_ascii=index % 2 == 0) + end
            for index, (name, values) in enumerate(calls)
        )

    return write


def json_list(begin, end, name_key="name", arguments="arguments"):
    return lambda calls: begin + json.dumps([{name_key: name, arguments: values} for name, values in calls]) + end


def tagged(wrapper, end, call, call_end, argument, argument_end, edge=""):
    def write(calls):
        bodies = []
        for name, values in calls:
            lines = [argument % key + edge + xml_value(value) + edge + argument_end for key, value in values.items()]
            bodies.append("\n".join([call % name, *lines, call_end]))
        return "\n".join([wrapper, *bodies, end]).strip("\n")

    return write


def pairs(prefix):
    def write(calls):
        return "\n".join(
            f"<{prefix}tool_call>{name}\n"
            + "".join(
                f"<{prefix}arg_key>{key}</{prefix}arg_key>\n<{prefix}arg_value>{xml_value(value)}</{prefix}arg_value>\n"
                for key, value in values.items()
            )
            + f"</{prefix}tool_call>"
            for name, values in calls
        )

    return write


def python_list(begin, end):
    def write(calls):
        texts = [f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})" for name, values in calls]
        return f"{begin}[{', '.join(texts)}]{end}"

    return write


def gemma(begin, end, quote):
    return lambda calls: "".join(f"{begin}call:{name}{gemma_value(values, quote)}{end}" for name, values in calls)


def kimi(calls):
    texts = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(values)}<|tool_call_end|>"
        for index, (name, values) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"


def deepseek(head, tail):
    def write(calls):
        texts = [
            f"<｜tool▁call▁begin｜>{head % name}{json.dumps(values)}{tail}<｜tool▁call▁end｜>" for name, values in calls
        ]
        return f"<｜tool▁calls▁begin｜>{''.join(texts)}<｜tool▁calls▁end｜>"

    return write


def dsml(calls):
    lines = ["<｜DSML｜function_calls>"]
    for name, values in calls:
        lines.append(f'<｜DSML｜invoke name="{name}">')
        for key, value in values.items():
            is_string = str(isinstance(value, str)).lower()
            lines.append(f'<｜DSML｜parameter name="{key}" string="{is_string}">{xml_value(value)}</｜DSML｜parameter>')
        lines.append("</｜DSML｜invoke>")
    return "\n".join([*lines, "</｜DSML｜function_calls>"])


def harmony(calls):
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(values)}<|call|>"
        for name, values in calls
    )


def minicpm(calls):
    texts = []
    for index, (name, values) in enumerate(calls):
        arguments = ""
        for key, value in values.items():
            text = xml_value(value)
            if index % 2:
                text = text.replace("&", "&amp;").replace("<", "&lt;")
            elif "<" in text or "&" in text:
                text = f"<![CDATA[{text}]]>"
            arguments += f'<param name="{key}">{text}</param>'
        texts.append(f'<function name="{name}">{arguments}</function>')
    return "\n".join(texts)


QWEN = ("<function=%s>", "</function>", "<parameter=%s>", "</parameter>", "\n")
WRITERS = {
    "harmony": harmony,
    "gemma4": gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "minimax": tagged(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        '<invoke name="%s">',
        "</invoke>",
        '<parameter name="%s">',
        "</parameter>",
    ),
    "deepseek_v32": dsml,
    "kimi": kimi,
    "deepseek_v3": deepseek("function<｜tool▁sep｜>%s\n```json\n", "\n```"),
    "deepseek": deepseek("%s<｜tool▁sep｜>", ""),
    "command": json_list("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"),
    "longcat": pairs("longcat_"),
    "glm": pairs(""),
    "minicpm": minicpm,
    "seed": tagged("<seed:tool_call>", "</seed:tool_call>", *QWEN),
    "qwen3_coder": tagged("<tool_call>", "</tool_call>", *QWEN),
    "lfm2": python_list("<|tool_call_start|>", "<|tool_call_end|>"),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(values)}" for name, values in calls),
    "mistral_list": json_list("[TOOL_CALLS]", ""),
    "nemotron": json_list("<TOOLCALL>", "</TOOLCALL>"),
    "hermes": json_objects("<tool_call>\n", "\n</tool_call>", "\n"),
    "phi": json_objects("<|tool_call|>", "<|/tool_call|>", ""),
    "granite": json_list("<|tool_call|>", ""),
    "llama_pythonic": python_list("", ""),
    "llama_json": json_objects("", "", "; ", "parameters"),
}
# Calls of these only begin a reply, so nothing can stand before them.
BARE = {"llama_pythonic", "llama_json"}
# Whether a whole call ends with a text of its own.
HAS_NO_END = {"mistral", "mistral_list", "granite", *BARE}

words = st.text(st.sampled_from("ab z\n\"'\\/é漢🙂\t{}[](),:=0&-"), max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(-1e6, 1e6).map(lambda x: round(x, 3)) | words,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["k", "key2", "x_y"]), inner, max_size=3)
    ),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": words,
        "count": st.integers(-(10**12), 10**12),
        "ratio": st.floats(-1e6, 1e6).map(lambda x: round(x, 3)),
        "flag": st.booleans(),
        "items": st.lists(json_values, max_size=3),
        "options": st.dictionaries(st.sampled_from(["k", "key2", "x_y"]), json_values, max_size=3),
    },
)
calls = st.lists(st.tuples(st.sampled_from(["get_weather", "search"]), arguments), min_size=1, max_size=3)


def as_content(family, text):
    """A message of content, in the family's markup."""
    return f"<|channel|>final<|message|>{text}<|end|>" if family == "harmony" else text


def markers_of(family):
    """Texts from which marker soup is made."""
    entry = next(one for one in FAMILIES if one.name == family)
    written = WRITERS[family]([("get_weather", {"text": "a", "count": 1}), ("search", {})])
    pieces = re.findall(r"</?[^<>]*>|\[[A-Z_]+\]|[\w.]+|\s+|[^\w\s]", written)
    return sorted({*pieces, *entry.tokens, "<think>", "</think>", "get_weather", '{"name": "search", "arguments": {'})


def cut(draw, text, max_pieces=12):
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=max_pieces)))
    return [text[start:end] for start, end in itertools.pairwise([0, *places, len(text)])]


@st.composite
def texts(draw, family):
    """Text near the format: soup of its pieces, and written calls, whole, cut off or damaged."""
    soup = st.lists(st.sampled_from(markers_of(family)) | st.text(max_size=4), max_size=20).map("".join)
    pieces = []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            pieces.append(draw(soup))
            continue
        written = WRITERS[family](draw(calls))
        start = draw(st.integers(0, len(written)))
        damage = draw(st.sampled_from(["", "<", "}", '"', "x", "\\", "<think>"]))
        pieces.append(draw(st.sampled_from([written, written[:start], written[:start] + damage + written[start:]])))
    return "".join(pieces)


def check_parts(parts):
    """What holds for any text: the order of parts, ids, arguments."""
    open_call = None
    for part in parts:
        match part:
            case ToolCallStart(index):
                assert open_call is None
                open_call = index
            case ToolArgumentsDelta(index):
                assert index == open_call
            case ToolCallEnd(index):
                assert index == open_call
                open_call = None
    assert open_call is None
    reply = collect(parts)
    assert [part.index for part in parts if isinstance(part, ToolCallStart)] == list(range(len(reply.tool_calls)))
    assert len({call.id for call in reply.tool_calls}) == len(reply.tool_calls)
    for call in reply.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
        assert call.name in {"get_weather", "search"}


# ---- laws -------------------------------------------------------------------------------------------------------


def test_every_family_is_tested():
    """The writers here are those of the families there."""
    assert set(WRITERS) == set(FAMILY_NAMES)


def chunking_never_matters(family, data):
    """Any text cut anywhere gives the same parts as in one piece and as in single characters; nothing raises."""
    text = data.draw(texts(family))
    starts_in_reasoning = data.draw(st.booleans())

    def run(pieces):
        return parts_of(make_parser(family, starts_in_reasoning=starts_in_reasoning), pieces)

    whole = run([text])
    check_parts(whole)

    assert merged(run(list(text))) == merged(whole)
    assert merged(run(cut(data.draw, text))) == merged(whole)


def no_character_is_lost_or_doubled(family, data):
    """Content and the calls' raw texts are the reply, in order, but for white space and markers around them."""
    text = data.draw(texts(family))
    parts = parts_of(make_parser(family, reasoning="none"), cut(data.draw, text))
    entry = next(one for one in FAMILIES if one.name == family)

    def essence(given):
        if family == "harmony":
            given = re.sub(r"<\|(start|channel)\|>.*?<\|message\|>", "", given, flags=re.DOTALL)
        for token in entry.tokens:
            given = given.replace(token, "")
        return re.sub(r"[ \t\r\n]+", "", given)

    kept = [
        part.raw if isinstance(part, ToolCallEnd) else part.text
        for part in parts
        if isinstance(part, ToolCallEnd | ContentDelta | ReasoningDelta)
    ]
    if family == "harmony":
        # Its headers are markup too, so only what the parser called content or reasoning is looked for.
        position = 0
        for piece in kept:
            position = text.index(piece, position) + len(piece)
    else:
        assert essence("".join(kept)) == essence(text)


def written_calls_are_read(family, data):
    """What the family's template writes comes back: names, arguments and types, and content before and after."""
    asked = data.draw(calls)
    before = "" if family in BARE else data.draw(st.sampled_from(["", "I look it up.", "a < b [1] {2}"]))
    after = data.draw(st.sampled_from(["", "Done <b>.", "x"])) if family != "mistral" else ""
    text = (as_content(family, before) if before else "") + data.draw(st.sampled_from(["", "\n", " \n\n"])) * (
        family != "harmony"
    )
    text += WRITERS[family](asked) + ("\n" + as_content(family, after) if after else "")
    reply = collect(parts_of(make_parser(family), cut(data.draw, text)))

    assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == asked
    assert all(call.is_complete for call in reply.tool_calls)
    assert reply.content.split() == (before + " " + after).split()


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_call_that_is_cut_off_has_valid_arguments(family):
    """Cut at every character: either the markup is content, or a call with what was certain, closed."""
    whole = {"text": 'a "quoted" \\ é🙂 line\nnext', "options": {"k": [1, 2, {"x_y": None}]}, "count": 12}
    text = WRITERS[family]([("get_weather", whole)])
    seen = set()
    for length in range(len(text)):
        reply = parse(family, text[:length])
        if reply.tool_calls:
            (call,) = reply.tool_calls
            found = json.loads(call.arguments)
            seen.add(call.is_complete)
            assert reply.content == ""
            assert set(found) <= set(whole)
            if call.is_complete:
                assert found == whole
            elif "text" in found:
                assert whole["text"].startswith(found["text"])
        elif family != "harmony":
            assert reply.content.strip() == text[:length].strip()
    assert False in seen


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_arguments_stream_as_they_come(family):
    """Character by character, the name comes before the string argument's text ends, and that text in many deltas."""
    text = WRITERS[family]([("get_weather", {"text": "word " * 20 + "end"})])
    parser = make_parser(family)
    started_at, deltas = None, 0
    for place, character in enumerate(text):
        for part in parser.push(character):
            if isinstance(part, ToolCallStart):
                started_at = place
                assert part.name == "get_weather"
            deltas += isinstance(part, ToolArgumentsDelta)

    assert started_at is not None
    assert started_at < text.index("word word")
    assert deltas > 60


@pytest.mark.parametrize("family", sorted(set(FAMILY_NAMES) - {"harmony"}))
def test_what_is_no_call_comes_back_as_content(family):
    """Unknown tools, broken markup, calls without tools to call: the reply's text, unchanged."""
    text = WRITERS[family]([("get_weather", {"text": "a"})])
    for broken in (
        text.replace("get_weather", "rm_rf"),
        text.replace("get_weather", "", 1),
        text[: text.index("get_weather") + len("get_weather")] + " ~ nonsense",
        text[: text.index("get_weather")],
    ):
        reply = parse(family, broken)
        assert (reply.content, reply.tool_calls) == (broken, ()), broken
    if family != "command":
        assert parse(family, text, tools=None).content == text


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_call_after_a_broken_one_is_read(family):
    """A malformed call spoils no later one."""
    if family in BARE:
        pytest.skip("its calls have no beginning of their own")
    good = WRITERS[family]([("search", {"count": 3})])
    broken = WRITERS[family]([("no_such_tool", {"text": "a"})])
    reply = parse(family, broken + "\n" + good)

    assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == [("search", {"count": 3})]
    assert "no_such_tool" in reply.content


@pytest.mark.parametrize("family", sorted(set(FAMILY_NAMES) - {"harmony"}))
def test_text_that_ends_in_a_possible_marker_is_delivered(family):
    """Every beginning of a call's first marker, at the very end of a reply, is content."""
    entry = next(one for one in FAMILIES if one.name == family)
    for marker in (*entry.grammar.openers, "<think>"):
        for length in range(1, len(marker)):
            text = f"see {marker[:length]}"
            parser = make_parser(family)
            assert merged(parts_of(parser, list(text))) == [ContentDelta(text)]


@pytest.mark.parametrize("family", sorted(set(FAMILY_NAMES) - {"harmony"}))
@pytest.mark.parametrize("starts_inside", [False, True])
def test_a_call_inside_reasoning_is_none(family, starts_inside):
    """Markup within reasoning is reasoning, cut anywhere; the call after it is a call."""
    call = WRITERS[family]([("search", {"text": "a"})])
    text = f"{'' if starts_inside else '<think>'}\nMaybe {call} will do.\n</think>\n\n{call}"
    parts = parts_of(make_parser(family, starts_in_reasoning=starts_inside), list(text))
    reply = collect(parts)

    assert reply.reasoning == f"Maybe {call} will do."
    assert reply.content == ""
    assert [call.name for call in reply.tool_calls] == ["search"]


LAWS = [chunking_never_matters, no_character_is_lost_or_doubled, written_calls_are_read]


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("law", LAWS)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_laws_of_any_text(law, family, data):
    """Chunking never matters, no character is lost or doubled, written calls are read."""
    law(family, data)


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("law", LAWS)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_laws_of_any_text_at_length(law, family, data):
    """The same laws, on many texts."""
    law(family, data)


@settings(max_examples=100, deadline=None)
@given(text=st.text(), data=st.data())
@example(text="a" + " " * 200 + "<tool_call>", data=None)
def test_plain_text_is_content(text, data):
    """Text without markers passes unchanged, in every family."""
    family = data.draw(st.sampled_from(sorted(set(FAMILY_NAMES) - BARE))) if data else "hermes"
    pieces = cut(data.draw, text) if data else list(text)

    assert collect(parts_of(make_parser(family), pieces)).content == text


@pytest.mark.parametrize("family", ["hermes", "llama_json"])
def test_white_space_is_held_back_only_so_far(family):
    """A model that writes nothing but line ends is still seen to write."""
    parts = make_parser(family).push("a" + "\n" * 1000)

    assert len(collect(parts).content) > 900


# ---- an oracle nobody here wrote --------------------------------------------------------------------------------

ORACLES = {
    "functiongemma": "function_gemma",
    "gemma4": "gemma4",
    "glm": "glm47",
    "hermes": "json_tools",
    "kimi": "kimi_k2",
    "lfm2": "pythonic",
    "longcat": "longcat",
    "minicpm": "minicpm5",
    "minimax": "minimax_m2",
    "mistral": "mistral",
    "mistral_list": "mistral",
    "qwen3_coder": "qwen3_coder",
}


@pytest.mark.parametrize("family", sorted(ORACLES))
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"text": "Paris, France"},
        {"text": "42", "count": 42},
        {"count": -7, "ratio": 2.5, "flag": True},
        {"text": "é漢🙂", "items": [1, 2, 3]},
    ],
)
def test_whole_calls_equal_mlx_lms(family, values):
    """mlx-lm's parser of the family reads the same name and arguments from one written call."""
    oracle = pytest.importorskip(f"mlx_lm.tool_parsers.{ORACLES[family]}", exc_type=ImportError)
    if family == "functiongemma" and "items" in values:
        pytest.skip("mlx-lm's parser of this family reads no lists")
    if family == "longcat" and not values:
        pytest.skip("mlx-lm's parser of this family needs an argument")
    text = WRITERS[family]([("get_weather", values)])
    inner = text.removeprefix(oracle.tool_call_start)
    inner = inner.removesuffix(oracle.tool_call_end) if oracle.tool_call_end else inner
    expected = importlib.import_module(oracle.__name__).parse_tool_call(inner.strip("\n"), TOOLS)
    expected = expected[0] if isinstance(expected, list) else expected
    (call,) = parse(family, text).tool_calls

    assert (call.name, json.loads(call.arguments)) == (expected["name"], expected["arguments"])
