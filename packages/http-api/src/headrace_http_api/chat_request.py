"""The body of `POST /v1/chat/completions`."""

from typing import Annotated

from attrs import frozen
from cattrs import Converter

from headrace_http_api.conversation_fields import ConversationFields, register_conversation_hooks
from headrace_http_api.errors import InvalidRequest
from headrace_http_api.generation_request import GenerationFields, PositiveInt, make_request_converter
from headrace_http_api.tool_fields import Tools
from headrace_http_api.validation import AtLeast

__all__ = ["ChatRequest", "make_chat_converter"]

Budget = Annotated[int, AtLeast(0)]


@frozen(kw_only=True)
class ChatRequest(ConversationFields, GenerationFields):
    """A validated chat request."""

    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    parallel_tool_calls: bool | None = None
    thinking_budget: Budget | None = None
    thinking_token_budget: Budget | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        return self.wanted_logprobs(self.logprobs)

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

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
    def thinks(self) -> bool | None:
        switch = (self.template_kwargs or {}).get("enable_thinking")
        if isinstance(switch, bool):
            return switch
        return None if self.reasoning_effort is None else self.reasoning_effort != "none"

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
    register_conversation_hooks(converter)
    return converter
