"""Arguments in the notations of models become JSON: against json and ast, with schemas, with what models get wrong."""

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_http_api.parsing.schemas import argument_as_json, tool_types
from headrace_http_api.parsing.values import GEMMA, PYTHON, as_json

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)


@given(value=values, is_ascii=st.booleans(), indent=st.sampled_from([None, 2]))
def test_json_is_kept(value, is_ascii, indent):
    """Any JSON, in any layout, comes back as the same value."""
    assert json.loads(as_json(json.dumps(value, ensure_ascii=is_ascii, indent=indent))) == value


@given(text=st.text(st.sampled_from('{}[]",:\\u0189dDefn-+.eE truefalsn\n\t'), max_size=40))
def test_what_is_taken_is_json(text):
    """Of any text, what is taken is valid JSON; and JSON that Python takes strictly is taken, with the same value."""
    written = as_json(text)
    if written is not None:
        json.loads(written)
    try:
        expected = json.loads(text, parse_constant=float.fromhex)
    except ValueError:
        return
    assert written is not None
    if "\\ud" not in text.lower():
        assert json.loads(written) == expected


@given(value=values)
def test_python_literals_are_read(value):
    """What Python's repr writes, ast and this read alike."""
    text = repr(value)

    assert json.loads(as_json(text, PYTHON)) == ast.literal_eval(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r'"\d+\.py"', r"\d+\.py"),
        ('"a\nb\tc"', "a\nb\tc"),
        (r'"it\'s"', "it's"),
        (r'"\ud83d\ude42"', "🙂"),
        (r'"\ud83d!"', "\ufffd!"),
        (r'"\ude42"', "\ufffd"),
        (r'"\u12"', r"\u12"),
        ('{"a": 1,}', {"a": 1}),
        ("[True, None]", [True, None]),
    ],
)
def test_slips_are_forgiven(text, expected):
    """Backslashes and line ends without escapes, halves of pairs, trailing commas, Python's words."""
    assert json.loads(as_json(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"a"}',
        "{a: 1}",
        "[1 2]",
        "NaN",
        "Infinity",
        "01",
        "1.",
        "+1",
        "tru",
        "'a'",
        "[" * 200,
        "9" * 5000,
        "{} x",
    ],
)
def test_what_is_no_json_is_refused(text):
    """Nothing is guessed; depth and digits have a limit, since readers of JSON have one."""
    assert as_json(text) is None


def test_deep_values_are_read():
    """Sixty levels are fine."""
    assert as_json("[" * 60 + "]" * 60) == "[" * 60 + "]" * 60


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{a:<|"|>x, "y" \\ {z}<|"|>,n:-2.5,b:true}', {"a": 'x, "y" \\ {z}', "n": -2.5, "b": True}),
        ('{a:[1,<|"|><b><|"|>,{k:null}],<|"|>x y<|"|>:Paris FR}', {"a": [1, "<b>", {"k": None}], "x y": "Paris FR"}),
        ("{}", {}),
    ],
)
def test_gemmas_notation(text, expected):
    """Bare keys, strings between their own delimiter, bare strings."""
    assert json.loads(as_json(text, GEMMA)) == expected


SCHEMA = {
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"type": ["number", "null"]},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "e": {"enum": ["a", "1"]},
        "u": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "l": {"type": "string", "nullable": True},
        "x": {},
    }
}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("s", "42", "42"),
        ("s", "null", "null"),
        ("s", ' {"a": 1}\n', ' {"a": 1}\n'),
        ("i", " 42\n", 42),
        ("i", "42.0", 42),
        ("i", "many", "many"),
        ("n", "null", None),
        ("n", "1e3", 1000.0),
        ("b", "True", True),
        ("b", "false", False),
        ("o", '{"a": [1]}', {"a": [1]}),
        ("o", "{'a': None}", {"a": None}),
        ("e", "1", "1"),
        ("u", "7", 7),
        ("u", "7.5", "7.5"),
        ("u", "seven", "seven"),
        ("l", "null", None),
        ("l", "5", "5"),
        ("x", "5", 5),
        ("x", "five", "five"),
        ("unknown", "[1]", [1]),
    ],
)
def test_texts_become_what_the_schema_says(name, text, expected):
    """Strings stay as written; others are read as JSON or Python if the schema allows it, else they are strings."""
    types = tool_types([{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}])
    value = json.loads(argument_as_json(text, types.of("f", name)))

    assert (value, type(value)) == (expected, type(expected))


@pytest.mark.parametrize(
    "tool",
    [
        {},
        {"function": None},
        {"function": {"name": 5}},
        {"name": "f", "parameters": []},
        {"name": "f", "parameters": {"properties": 3}},
        {"name": "f", "input_schema": {"properties": {"a": True, "b": {"type": 7}, "c": {"anyOf": "x"}}}},
    ],
)
def test_odd_tools_leave_types_unknown(tool):
    """Schemas are others' affair: what cannot be read of one is no error here."""
    assert tool_types([tool]).of("f", "a") is None
