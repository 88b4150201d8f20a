"""Messages and tools reach templates in one form, whatever the client sent, and the client's own are not changed."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_models.errors import TemplateError
from headrace_models.messages import normalize_messages, normalize_tools

LEAVES = st.one_of(
    st.just({}),
    st.sampled_from([{"enum": ["a"]}, {"const": 1}, {"default": 0.5}, {"pattern": "x"}, {"type": ["string", "null"]}]),
    st.sampled_from([{"type": "integer"}, {"$ref": "#/$defs/a"}, {"description": "d"}, {"minimum": 3}]),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["a", "type", "properties"]), inner, max_size=3).map(
            lambda properties: {"properties": properties}
        ),
        inner.map(lambda item: {"items": item}),
        st.lists(inner, min_size=1, max_size=3).map(lambda branches: {"anyOf": branches}),
        inner.map(lambda item: {"type": "object", "additionalProperties": item, "$defs": {"a": item}}),
    ),
    max_leaves=8,
)


def nodes(schema):
    """Every schema in a schema, found by the plain rule of JSON Schema."""
    yield schema
    for name in ("properties", "$defs"):
        for one in schema.get(name, {}).values():
            yield from nodes(one)
    for one in [*schema.get("anyOf", []), *(schema[n] for n in ("items", "additionalProperties") if n in schema)]:
        yield from nodes(one)


def without_inferred(schema, original):
    if isinstance(original, dict):
        return {name: without_inferred(schema[name], value) for name, value in original.items()}
    return (
        [without_inferred(*pair) for pair in zip(schema, original, strict=True)] if type(original) is list else schema
    )


@settings(max_examples=100, deadline=None)
@given(schema=SCHEMAS)
def test_every_schema_gets_a_type_and_keeps_the_rest(schema):
    """Each node of a tool's schema has a type afterwards; what was there stays, also in the caller's copy."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    before = copy.deepcopy(tools)
    (tool,) = normalize_tools(tools)
    typed = tool["function"]["parameters"]
    assert tools == before
    assert all("type" in node for node in nodes(typed))
    assert without_inferred(typed, schema) == schema


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {}}, "object"),
        ({"items": {}}, "array"),
        ({"enum": ["a", "b"]}, "string"),
        ({"enum": [1, 2]}, "integer"),
        ({"const": True}, "boolean"),
        ({"default": 0.5}, "number"),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, "integer"),
        ({"oneOf": [{"enum": ["a"]}]}, "string"),
        ({"$ref": "#/$defs/a"}, "object"),
        ({"description": "anything"}, "string"),
        ({"type": ["integer", "null"]}, ["integer", "null"]),
    ],
)
def test_the_inferred_type_is_what_the_schema_describes(schema, expected):
    """The type follows from the keywords, the branches or the example values; a given one is kept."""
    parameters = {"properties": {"x": schema}}
    (tool,) = normalize_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert tool["function"]["parameters"]["properties"]["x"]["type"] == expected
    assert tool["function"]["parameters"]["type"] == "object"


def test_no_tools_are_none_and_odd_ones_are_refused():
    """An empty list is no tools; what is no list, or nested without end, is a TemplateError."""
    assert normalize_tools(None) is normalize_tools([]) is None
    with pytest.raises(TemplateError, match="must be a list"):
        normalize_tools({"name": "f"})
    deep = {}
    for _ in range(99):
        deep = {"items": deep}
    with pytest.raises(TemplateError, match="nested"):
        normalize_tools([{"function": {"name": "f", "parameters": deep}}])


@settings(max_examples=60, deadline=None)
@given(
    arguments=st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3) | st.none(), max_size=3),
    is_text=st.booleans(),
)
def test_arguments_reach_templates_as_objects(arguments, is_text):
    """A call's arguments are an object, sent as one or as its JSON text."""
    function = {"name": "f", "arguments": json.dumps(arguments) if is_text else arguments}
    (message,) = normalize_messages([{"role": "assistant", "content": None, "tool_calls": [{"function": function}]}])
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": arguments}
    assert message["content"] == ""


@pytest.mark.parametrize(
    ("arguments", "expected"), [("", {}), (None, {}), ("x = 1", "x = 1"), ("[1]", "[1]"), ("1", "1")]
)
def test_arguments_that_are_no_object(arguments, expected):
    """No arguments are an empty object; a text that holds no object stays the text that the model once wrote."""
    call = {"function": {"name": "f", "arguments": arguments}}
    (message,) = normalize_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize(
    "content", [[{"type": "text", "text": "a"}, {"type": "image"}], [{"type": "image", "text": "alt"}], ["a"], [1], {}]
)
def test_content_that_is_more_than_text_is_left_intact(content):
    """Only arrays of nothing but text parts become one string."""
    assert normalize_messages([{"role": "user", "content": content}])[0]["content"] == content
