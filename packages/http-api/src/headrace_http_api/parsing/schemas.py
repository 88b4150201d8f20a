"""What the request's tools say of their arguments, and texts converted to it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from attrs import frozen

from headrace_http_api.parsing.outbox import quoted
from headrace_http_api.parsing.reader import SPACE
from headrace_http_api.parsing.values import PYTHON, STRING, Types, as_json

__all__ = ["ToolTypes", "argument_as_json", "tool_types"]

_MAX_DEPTH = 8
_INTEGRAL = re.compile(r"(-?[0-9]+)\.0+")


@frozen
class ToolTypes:
    """The tools of a request: their names, and the types of their arguments."""

    by_tool: Mapping[str, Mapping[str, Types]]

    def of(self, tool: str, argument: str) -> Types:
        """Return the types of one argument."""
        return self.by_tool.get(tool, {}).get(argument)


def tool_types(tools: Iterable[Mapping[str, Any]]) -> ToolTypes:
    """Read tools as OpenAI or Anthropic shape them. What cannot be read of a schema leaves its types unknown."""
    by_tool: dict[str, Mapping[str, Types]] = {}
    for tool in tools:
        inner = tool.get("function")
        function = cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else tool
        name = function.get("name")
        if isinstance(name, str) and name:
            by_tool[name] = _properties(function.get("parameters") or function.get("input_schema"))
    return ToolTypes(by_tool)


def _properties(schema: object) -> dict[str, Types]:
    if not isinstance(schema, Mapping):
        return {}
    properties = cast("Mapping[str, Any]", schema).get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {str(name): _types(entry, 0) for name, entry in cast("Mapping[Any, Any]", properties).items()}


def _types(schema: object, depth: int) -> Types:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    entry = cast("Mapping[str, Any]", schema)
    found: set[str] = set()
    declared = entry.get("type")
    if isinstance(declared, str):
        found.add(declared)
    elif isinstance(declared, Sequence):
        found.update(name for name in cast("Sequence[Any]", declared) if isinstance(name, str))
    for name in ("anyOf", "oneOf", "allOf"):
        for branch in _entries(entry.get(name)):
            types = _types(branch, depth + 1)
            # A branch of which nothing is known allows anything.
            if types is None:
                return None
            found |= types
    if not found:
        values = _entries(entry.get("enum")) or ([entry["const"]] if "const" in entry else [])
        found.update(_type_of(value) for value in values)
    if entry.get("nullable") is True and found:
        found.add("null")
    return frozenset(name.lower() for name in found) or None


def _entries(value: object) -> Sequence[Any]:
    return cast("Sequence[Any]", value) if isinstance(value, (list, tuple)) else ()


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case Mapping():
            return "object"
        case _:
            return "array"


_FIRST = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


def argument_as_json(text: str, types: Types) -> str:
    """Return the JSON of an argument that a format writes without quotes.

    A text that must be a string stays as it is. Others are read as JSON, or as Python writes its values, if the schema
    allows what they are; what fits nothing is a string.
    """
    if types == STRING:
        return quoted(text)
    bare = text.strip(SPACE)
    for value in (as_json(bare), as_json(bare, PYTHON)):
        if value is not None:
            fitting = _fitting(value, types)
            if fitting is not None:
                return fitting
    return quoted(text)


def _fitting(value: str, types: Types) -> str | None:
    kind = _FIRST.get(value[0], "number")
    if types is None or kind in types:
        return value
    if kind == "number" and "integer" in types:
        integral = _INTEGRAL.fullmatch(value)
        if integral is not None:
            return integral.group(1)
        return value if value.lstrip("-").isdigit() or "string" not in types else None
    return None
