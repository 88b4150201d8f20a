"""The tools that a model may call, and which of them it must."""

from typing import Any, Literal

from attrs import frozen
from cattrs import Converter

from headrace_http_api.json_body import shown
from headrace_http_api.validation import FieldError

__all__ = ["Tool", "ToolChoice", "Tools", "register_tool_hooks"]

MAX_TOOLS = 512
MAX_NAME_CHARS = 128

ToolMode = Literal["none", "auto", "required"]


@frozen
class Tool:
    """One function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments, which are an object.
        is_strict: arguments are held to the schema even where the model is free not to call.
        described: the whole tool as the client sent it, for the chat template.
    """

    name: str
    parameters: dict[str, Any]
    is_strict: bool
    described: dict[str, Any]


@frozen
class ToolChoice:
    """Whether the model calls a tool: never, as it likes, or always; `name` is the only one that it may call."""

    mode: ToolMode
    name: str | None = None


Tools = tuple[Tool, ...]


def register_tool_hooks(converter: Converter) -> None:
    """Teach a converter the tool fields' own forms."""
    converter.register_structure_hook_func(lambda kind: kind == Tools, _to_tools)
    converter.register_structure_hook_func(lambda kind: kind is ToolChoice, _to_choice)


def _to_tools(value: Any, _kind: type) -> Tools:
    if not isinstance(value, list):
        raise FieldError(f"is {shown(value)}; it must be a list of tools")
    if len(value) > MAX_TOOLS:
        raise FieldError(f"has {len(value)} entries; at most {MAX_TOOLS} tools are served")
    tools = tuple(_to_tool(entry, f"[{index}]") for index, entry in enumerate(value))
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in names:
            raise FieldError(f"is {shown(tool.name)} again; give each tool once", subpath=f"[{index}].function.name")
        names.add(tool.name)
    return tools


def _to_tool(value: Any, path: str) -> Tool:
    tool = _object(value, path)
    if tool.get("type", "function") != "function":
        raise FieldError(f"is {shown(tool['type'])}; only tools of type function are served", subpath=f"{path}.type")
    path = f"{path}.function"
    function = _object(tool.get("function"), path)
    name, parameters, strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise FieldError(
            f"is {shown(name)}; it must be a string of 1 to {MAX_NAME_CHARS} characters", subpath=f"{path}.name"
        )
    if function.get("description") is not None and not isinstance(function["description"], str):
        raise FieldError(f"is {shown(function['description'])}; it must be a string", subpath=f"{path}.description")
    if strict is not None and type(strict) is not bool:
        raise FieldError(f"is {shown(strict)}; it must be true or false", subpath=f"{path}.strict")
    schema = {} if parameters is None else _object(parameters, f"{path}.parameters")
    kind = schema.get("type", "object")
    if kind != "object":
        raise FieldError(
            f"is {shown(kind)}; a tool's arguments are an object, so it must be 'object'",
            subpath=f"{path}.parameters.type",
        )
    return Tool(name, {"type": "object", **schema}, bool(strict), {"type": "function", **tool})


def _to_choice(value: Any, _kind: type) -> ToolChoice:
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    if not isinstance(value, dict):
        raise FieldError(f"is {shown(value)}; it must be none, auto, required or an object that names a function")
    if value.get("type", "function") != "function":
        raise FieldError(f"is {shown(value['type'])}; only function is served", subpath=".type")
    name = _object(value.get("function"), ".function").get("name")
    if not isinstance(name, str) or not name:
        raise FieldError(f"is {shown(name)}; it must be the name of a tool", subpath=".function.name")
    return ToolChoice("required", name)


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FieldError(f"is {shown(value)}; it must be an object", subpath=path)
    return value
