"""The messages of a conversation, as clients send them and as chat templates know them."""

import json
from typing import Any

from attrs import frozen
from cattrs import Converter

from headrace_http_api.json_body import shown
from headrace_http_api.validation import FieldError

__all__ = ["ROLES", "ChatMessage", "Messages", "ToolCall", "register_message_hooks"]

ROLES = ("system", "developer", "user", "assistant", "tool")


@frozen(kw_only=True)
class ToolCall:
    """A call that the assistant made in an earlier turn; arguments that are JSON objects are parsed."""

    id: str
    name: str
    arguments: object

    def for_template(self) -> dict[str, object]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@frozen(kw_only=True)
class ChatMessage:
    """One message, its text parts joined."""

    role: str
    content: str
    name: str | None = None
    reasoning: str | None = None
    tool_call_id: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def for_template(self) -> dict[str, object]:
        """Return the message as chat templates know it: they have no developer, only a system."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, object] = {"role": role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


Messages = tuple[ChatMessage, ...]


def register_message_hooks(converter: Converter) -> None:
    """Teach a converter the messages' own forms."""
    converter.register_structure_hook_func(lambda kind: kind == Messages, _to_messages)


def _to_messages(value: Any, _kind: type) -> Messages:
    if not isinstance(value, list) or not value:
        raise FieldError(f"is {shown(value)}; it must be a list of at least one message")
    return tuple(_to_message(entry, f"[{index}]") for index, entry in enumerate(value))


def _to_message(value: Any, path: str) -> ChatMessage:
    message = _object(value, path)
    role = message.get("role")
    if role not in ROLES:
        raise FieldError(f"is {shown(role)}; it must be one of {', '.join(ROLES)}", subpath=f"{path}.role")
    _refuse_unserved(message, path)
    calls = _to_tool_calls(message.get("tool_calls"), f"{path}.tool_calls", role)
    return ChatMessage(
        role=role,
        content=_to_content(message.get("content"), f"{path}.content", is_optional=bool(calls)),
        name=_optional_str(message, "name", path),
        reasoning=_optional_str(message, "reasoning_content", path) or _optional_str(message, "reasoning", path),
        tool_call_id=_optional_str(message, "tool_call_id", path),
        tool_calls=calls,
    )


def _refuse_unserved(message: dict[str, Any], path: str) -> None:
    for name in ("audio", "function_call"):
        if message.get(name) is not None:
            raise FieldError("is not served; send the turn as text", subpath=f"{path}.{name}")


def _to_content(value: Any, path: str, *, is_optional: bool) -> str:
    if isinstance(value, str):
        return value
    if value is None and is_optional:
        return ""
    if not isinstance(value, list) or not value:
        raise FieldError(f"is {shown(value)}; it must be a string or a list of text parts", subpath=path)
    return "".join(_to_text(part, f"{path}[{index}]") for index, part in enumerate(value))


def _to_text(value: Any, path: str) -> str:
    part = _object(value, path)
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise FieldError(f"is {shown(kind)}; only parts of type 'text' are served", subpath=f"{path}.type")
    return _required_str(part, kind, path)


def _to_tool_calls(value: Any, path: str, role: str) -> tuple[ToolCall, ...]:
    if value is None or value == []:
        return ()
    if role != "assistant":
        raise FieldError(f"is given for the role {role!r}; only an assistant calls tools", subpath=path)
    if not isinstance(value, list):
        raise FieldError(f"is {shown(value)}; it must be a list of tool calls", subpath=path)
    return tuple(_to_tool_call(entry, f"{path}[{index}]") for index, entry in enumerate(value))


def _to_tool_call(value: Any, path: str) -> ToolCall:
    call = _object(value, path)
    function = _object(call.get("function"), f"{path}.function")
    return ToolCall(
        id=_required_str(call, "id", path),
        name=_required_str(function, "name", f"{path}.function"),
        arguments=_to_arguments(_required_str(function, "arguments", f"{path}.function")),
    )


def _to_arguments(text: str) -> object:
    """Templates iterate over arguments; what is no JSON object stays the text that the model once wrote."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FieldError(f"is {shown(value)}; it must be an object", subpath=path)
    return value


def _required_str(value: dict[str, Any], name: str, path: str) -> str:
    text = value.get(name)
    if not isinstance(text, str):
        raise FieldError(f"is {shown(text)}; it must be a string", subpath=f"{path}.{name}")
    return text


def _optional_str(value: dict[str, Any], name: str, path: str) -> str | None:
    return None if value.get(name) is None else _required_str(value, name, path)
