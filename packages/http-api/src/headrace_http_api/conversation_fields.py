"""The fields that say what a chat template renders."""

from typing import Any

from attrs import frozen
from cattrs import Converter

from headrace_http_api.errors import InvalidRequest
from headrace_http_api.json_body import shown
from headrace_http_api.messages import Messages, register_message_hooks
from headrace_http_api.ports import ServedModel
from headrace_http_api.tool_fields import ToolChoice, Tools, register_tool_hooks
from headrace_http_api.validation import FieldError

__all__ = ["ConversationFields", "TemplateKwargs", "cannot_render", "check_template", "register_conversation_hooks"]

_RESERVED_TEMPLATE_NAMES = ("messages", "tools", "documents", "add_generation_prompt")

TemplateKwargs = dict[str, object]


# Without slots, so that a class can inherit from it beside another one.
@frozen(kw_only=True, slots=False)
class ConversationFields:
    """A conversation, the tools that the model is told of, and variables of the template."""

    messages: Messages
    chat_template_kwargs: TemplateKwargs | None = None
    tools: Tools = ()
    tool_choice: ToolChoice | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None

    @property
    def usable_tools(self) -> Tools:
        """The tools that the model is told of."""
        return () if self.tool_choice is not None and self.tool_choice.mode == "none" else self.tools

    @property
    def template_kwargs(self) -> TemplateKwargs | None:
        """The template's variables that the request sets, by its own field or by `enable_thinking`."""
        if self.enable_thinking is None:
            return self.chat_template_kwargs
        return {"enable_thinking": self.enable_thinking, **(self.chat_template_kwargs or {})}

    @property
    def num_message_chars(self) -> int:
        return sum(len(message.content) for message in self.messages)

    def for_template(self) -> dict[str, Any]:
        """Return the arguments of the codec's `prepare_chat` and `render_chat`."""
        return {
            "messages": [message.for_template() for message in self.messages],
            "tools": [tool.described for tool in self.usable_tools] or None,
            "reasoning_effort": self.reasoning_effort,
            "template_kwargs": self.template_kwargs,
        }


def register_conversation_hooks(converter: Converter) -> None:
    """Teach a converter the conversation fields' own forms."""
    register_message_hooks(converter)
    register_tool_hooks(converter)
    converter.register_structure_hook_func(lambda kind: kind == TemplateKwargs, _to_template_kwargs)


def check_template(served: ServedModel) -> None:
    """Refuse a conversation for a model that has no chat template.

    Raises:
        InvalidRequest: tells where its text can go.
    """
    if not served.codec.has_chat_template:
        raise InvalidRequest(
            f"the model {served.name!r} has no chat template; send text to /v1/completions instead",
            param="model",
            code="no_chat_template",
        )


def cannot_render(error: ValueError, param: str = "messages") -> InvalidRequest:
    """Tell a template's refusal of what `param` holds."""
    return InvalidRequest(
        f"{param} cannot be put into the model's chat template: {error}", param=param, code="invalid_prompt"
    )


def _to_template_kwargs(value: Any, _kind: type) -> TemplateKwargs:
    if not isinstance(value, dict):
        raise FieldError(f"is {shown(value)}; it must be an object")
    for name in _RESERVED_TEMPLATE_NAMES:
        if name in value:
            raise FieldError("is set by the server itself; leave it out", subpath=f".{name}")
    return value
