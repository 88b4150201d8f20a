"""`POST /v1/chat/completions`."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from headrace_http_api.chat_replies import ChatStream, whole_choice
from headrace_http_api.chat_request import ChatRequest, make_chat_converter
from headrace_http_api.conversation_fields import cannot_render, check_template
from headrace_http_api.encoded import Choice, EncodedPrompt, Reply, check_capability, check_ids
from headrace_http_api.errors import InvalidRequest
from headrace_http_api.generation import answer
from headrace_http_api.ports import PreparedPrompt, ServedModel
from headrace_http_api.reply_shape import reply_shape
from headrace_http_api.running import Running
from headrace_http_api.services import ApiServices
from headrace_http_api.unsupported import CHAT_UNSUPPORTED
from headrace_http_api.validation import structure
from headrace_sampling import InvalidGrammar

__all__ = ["ChatDialect", "routes"]


class ChatDialect:
    """Chat completions as OpenAI shapes them."""

    runs_template = True
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    unsupported = CHAT_UNSUPPORTED

    def __init__(self) -> None:
        self._converter = make_chat_converter()

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        return structure(self._converter, body, ChatRequest)

    def num_chars(self, request: ChatRequest) -> int:
        return request.num_message_chars

    def encode(self, served: ServedModel, request: ChatRequest) -> Sequence[EncodedPrompt]:
        check_capability(served, "chat")
        check_template(served)
        prepared = _prepare(served, request)
        check_ids(prepared.ids, served, "messages")
        source = served.codec.template_source(with_tools=bool(request.usable_tools))
        try:
            shape = reply_shape(source, request, starts_in_reasoning=prepared.starts_in_reasoning)
        except InvalidGrammar as error:
            raise InvalidRequest(f"tools cannot be used: {error}", param="tools", code="invalid_grammar") from None
        return [
            EncodedPrompt(
                ids=prepared.ids,
                stable_boundary=prepared.stable_boundary,
                is_chat=True,
                grammar=shape.grammar,
                grammar_param=shape.param,
                new_parser=shape.new_parser,
            )
        ]

    def choice(self, running: Running[ChatRequest], place: int, index: int, reply: Reply) -> Choice:
        return whole_choice(running, place, index, reply)

    def open_stream(self, running: Running[ChatRequest], place: int, index: int) -> ChatStream:
        return ChatStream.of(running, place, index)


def routes(services: ApiServices) -> Sequence[BaseRoute]:
    """Routes of chat completions; `/chat/completions` is where clients of mlx_lm.server may look."""
    dialect = ChatDialect()

    async def chat_completions(request: Request) -> ASGIApp:
        return await answer(request, services, dialect)

    return [Route(path, chat_completions, methods=["POST"]) for path in ("/v1/chat/completions", "/chat/completions")]


def _prepare(served: ServedModel, request: ChatRequest) -> PreparedPrompt:
    try:
        return served.codec.prepare_chat(**request.for_template())
    except ValueError as exc:
        raise cannot_render(exc) from None
