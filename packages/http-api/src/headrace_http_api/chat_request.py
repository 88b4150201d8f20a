"""The body of `POST /v1/chat/completions`."""

import json
from typing import Annotated, Any

from attrs import frozen
from cattrs import Converter

from headrace_http_api.errors import InvalidRequest
from headrace_http_api.generation_request import GenerationFields, PositiveInt, make_request_converter
from headrace_http_api.json_body import shown
from headrace_http_api.tool_fields import ToolChoice, Tools, register_tool_hooks
from headrace_http_api.validation import AtLeast, FieldError

__all__ = ["ROLES", "ChatMessage", "ChatRequest", "ToolCall", "make_chat_converter"]

ROLES = ("system", "developer", "user", "assistant", "tool")

_RESERVED_TEMPLATE_NAMES = ("messages", "tools", "documents", "add_generation_prompt")


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
TemplateKwargs = dict[str, object]
Budget = Annotated[int, AtLeast(0)]


@frozen(kw_only=True)
class ChatRequest(GenerationFields):
    """A validated chat request."""

    messages: Messages
    max_completion_tokens: PositiveInt | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    logprobs: bool | None = None
    tools: Tools = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking_budget: Budget | None = None
    thinking_token_budget: Budget | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        return self.wanted_logprobs(self.logprobs)

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def usable_tools(self) -> Tools:
        """The tools that the model is told of."""
        return () if self.tool_choice is not None and self.tool_choice.mode == "none" else self.tools

    @property
    def must_call(self) -> bool:
        """Whether the reply is a call."""
        return self.tool_choice is not None and self.tool_choice.mode == "required"

    @property
    def callable_tools(self) -> Tools:
        """The tools that the reply may call if it must call one."""
        name = None if self.tool_choice is None else self.tool_choice.name
        return tuple(tool for tool in self.tools if name in (None, tool.name))

    @property
    def budget(self) -> int | None:
        """Most tokens of reasoning; None for no limit."""
        return self.thinking_token_budget if self.thinking_budget is None else self.thinking_budget

    @property
    def budget_name(self) -> str:
        """The field that limits the reasoning."""
        return "thinking_token_budget" if self.thinking_budget is None else "thinking_budget"

    @property
    def template_kwargs(self) -> TemplateKwargs | None:
        """The template's variables that the request sets, by its own field or by `enable_thinking`."""
        if self.enable_thinking is None:
            return self.chat_template_kwargs
        return {"enable_thinking": self.enable_thinking, **(self.chat_template_kwargs or {})}

    @property
    def thinks(self) -> bool | None:
        switch = (self.template_kwargs or {}).get("enable_thinking")
        if isinstance(switch, bool):
            return switch
        return None if self.reasoning_effort is None else self.reasoning_effort != "none"

    @property
    def num_chars(self) -> int:
        return sum(len(message.content) for message in self.messages)

    def check(self) -> None:
        """As the base's, with the fields of chats."""
        super().check()
        _ = self.num_top_logprobs
        self._check_tools()

    def _check_tools(self) -> None:
        if self.must_call and not self.callable_tools:
            name = None if self.tool_choice is None else self.tool_choice.name
            wanted = "a tool" if name is None else f"the tool {name!r}"
            raise InvalidRequest(f"tool_choice asks for {wanted}, which tools does not hold", param="tool_choice")
        asked = self.asked_grammar()
        if asked is not None and self.usable_tools:
            raise InvalidRequest(
                f"{asked.param} is given beside tools; a reply cannot both match it and be free to call a tool: "
                'set tool_choice to "none", or leave one of them out',
                param=asked.param,
            )


def make_chat_converter() -> Converter:
    """Make the strict converter of chat requests."""
    converter = make_request_converter()
    converter.register_structure_hook_func(lambda kind: kind == Messages, _to_messages)
    converter.register_structure_hook_func(lambda kind: kind == TemplateKwargs, _to_template_kwargs)
    register_tool_hooks(converter)
    return converter


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


def _to_template_kwargs(value: Any, _kind: type) -> TemplateKwargs:
    if not isinstance(value, dict):
        raise FieldError(f"is {shown(value)}; it must be an object")
    for name in _RESERVED_TEMPLATE_NAMES:
        if name in value:
            raise FieldError("is set by the server itself; leave it out", subpath=f".{name}")
    return value


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
