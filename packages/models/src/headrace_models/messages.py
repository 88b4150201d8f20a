"""Messages and tools in the form that chat templates are written for; what callers hand over is never changed."""

import json
from collections.abc import Mapping, Sequence
from typing import cast

from headrace_models.errors import TemplateError

__all__ = ["normalize_messages", "normalize_tools"]

_TEXT_PARTS = ("text", "input_text", "output_text")
# Where a JSON schema holds schemas: under names, in a list, or one.
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE_SCHEMAS = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_TYPE_HINTS = (
    ("object", ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "$ref")),
    ("array", ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains")),
    ("string", ("pattern", "minLength", "maxLength", "format")),
    ("number", ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
)
_MAX_DEPTH = 64

Object = Mapping[str, object]


def normalize_messages(messages: Sequence[Object]) -> list[dict[str, object]]:
    """Bring messages into the form that templates are written for.

    Role developer becomes system, an array of text parts one string, an absent content the empty string, and a
    tool call's argument string the object it holds. Arrays with other parts than text stay as they are.
    """
    return [_normalize(message) for message in messages]


def normalize_tools(tools: object) -> list[object] | None:
    """Give every schema in the tools a `type`, which many templates read without asking; no tools are None.

    Raises:
        TemplateError: the tools are no list, or nested too deeply.
    """
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise TemplateError(f"tools is {tools!r:.80}; it must be a list of tool descriptions")
    return [_normalize_tool(tool) for tool in cast("Sequence[object]", tools)] or None


# ---- messages ------------------------------------------------------------------------------------------------


def _normalize(message: Object) -> dict[str, object]:
    result = dict(message)
    if result.get("role") == "developer":
        result["role"] = "system"
    result["content"] = _joined(result.get("content"))
    calls = result.get("tool_calls")
    if isinstance(calls, list | tuple):
        result["tool_calls"] = [_parsed_call(call) for call in cast("Sequence[object]", calls)]
    return result


def _joined(content: object) -> object:
    if content is None:
        return ""
    if not isinstance(content, list | tuple):
        return content
    parts = cast("Sequence[object]", content)
    texts = [_text_of(part) for part in parts]
    known = [text for text in texts if text is not None]
    return "".join(known) if len(known) == len(texts) else parts


def _text_of(part: object) -> str | None:
    if not isinstance(part, Mapping):
        return None
    fields = cast("Object", part)
    text = fields.get("text")
    return text if isinstance(text, str) and fields.get("type", "text") in _TEXT_PARTS else None


def _parsed_call(call: object) -> object:
    function = cast("Object", call).get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    fields = cast("Object", function)
    return {**cast("Object", call), "function": {**fields, "arguments": _parsed(fields.get("arguments"))}}


def _parsed(arguments: object) -> object:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    if not arguments.strip():
        return {}
    try:
        parsed: object = json.loads(arguments)
    except (ValueError, RecursionError):
        # Some models are trained on calls whose arguments are no JSON; the template then sees the text.
        return arguments
    return cast("object", parsed) if isinstance(parsed, dict) else arguments


# ---- tools ---------------------------------------------------------------------------------------------------


def _normalize_tool(tool: object) -> object:
    if not isinstance(tool, Mapping):
        return tool
    fields = dict(cast("Object", tool))
    function = fields.get("function")
    if isinstance(function, Mapping):
        fields["function"] = _with_typed_schemas(cast("Object", function))
        return fields
    return _with_typed_schemas(fields)


def _with_typed_schemas(function: Object) -> dict[str, object]:
    names = ("parameters", "return", "input_schema")
    return {
        name: _typed(cast("Object", value), 0) if name in names and isinstance(value, Mapping) else value
        for name, value in function.items()
    }


def _typed(schema: Object, depth: int) -> dict[str, object]:
    if depth > _MAX_DEPTH:
        raise TemplateError(f"a tool's schema is nested more than {_MAX_DEPTH} deep: flatten it")
    result = {name: _typed_inside(name, value, depth + 1) for name, value in schema.items()}
    if result.get("type") is None:
        result["type"] = _inferred_type(result, is_root=depth == 0)
    return result


def _typed_inside(name: str, value: object, depth: int) -> object:
    if name in _NAMED_SCHEMAS and isinstance(value, Mapping):
        return {key: _typed_if_schema(one, depth) for key, one in cast("Object", value).items()}
    if name in _LISTED_SCHEMAS and isinstance(value, list | tuple):
        return [_typed_if_schema(one, depth) for one in cast("Sequence[object]", value)]
    return _typed_if_schema(value, depth) if name in _SINGLE_SCHEMAS else value


def _typed_if_schema(value: object, depth: int) -> object:
    return _typed(cast("Object", value), depth) if isinstance(value, Mapping) else value


def _inferred_type(schema: Object, *, is_root: bool) -> object:
    for name, hints in _TYPE_HINTS:
        if any(hint in schema for hint in hints):
            return name
    for name in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(name)
        kinds = [cast("Object", one).get("type") for one in _listed(branches) if isinstance(one, Mapping)]
        found = [kind for kind in kinds if kind != "null"]
        if found:
            return found[0]
    examples = [*_listed(schema.get("enum")), *(schema[name] for name in ("const", "default") if name in schema)]
    found = [_TYPE_NAMES[type(value)] for value in examples if type(value) in _TYPE_NAMES]
    return found[0] if found else "object" if is_root else "string"


def _listed(value: object) -> Sequence[object]:
    return cast("Sequence[object]", value) if isinstance(value, list | tuple) else ()


_TYPE_NAMES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
