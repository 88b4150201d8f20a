"""`POST /v1/chat/completions`."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from headrace_http_api.chat_request import ChatRequest, make_chat_converter
from headrace_http_api.dialect import Choice, EncodedPrompt, check_capability, check_ids
from headrace_http_api.errors import InvalidRequest
from headrace_http_api.generation import answer
from headrace_http_api.ports import ServedModel
from headrace_http_api.services import ApiServices
from headrace_http_api.unsupported import CHAT_UNSUPPORTED
from headrace_http_api.validation import structure
from headrace_scheduling.events import Finished

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
        return request.num_chars

    def encode(self, served: ServedModel, request: ChatRequest) -> EncodedPrompt:
        check_capability(served, "chat")
        if not served.codec.has_chat_template:
            raise InvalidRequest(
                f"the model {served.name!r} has no chat template; send text to /v1/completions instead",
                param="model",
                code="no_chat_template",
            )
        messages = [message.for_template() for message in request.messages]
        try:
            prepared = served.codec.prepare_chat(messages, template_kwargs=request.chat_template_kwargs)
        except ValueError as exc:
            raise InvalidRequest(
                f"messages cannot be put into the model's chat template: {exc}", param="messages", code="invalid_prompt"
            ) from None
        check_ids(prepared.ids, served, "messages")
        return EncodedPrompt(prepared.ids, prepared.stable_boundary, is_chat=True)

    def choice(self, text: str, finished: Finished) -> Choice:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None, **_end(finished)}

    def head_choice(self) -> Choice | None:
        return self._chunk_choice({"role": "assistant", "content": ""})

    def delta_choice(self, text: str) -> Choice:
        return self._chunk_choice({"content": text})

    def last_choice(self, finished: Finished) -> Choice:
        return self._chunk_choice({}) | _end(finished)

    def _chunk_choice(self, delta: Choice) -> Choice:
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}


def routes(services: ApiServices) -> Sequence[BaseRoute]:
    """Routes of chat completions."""
    dialect = ChatDialect()

    async def chat_completions(request: Request) -> ASGIApp:
        return await answer(request, services, dialect)

    return [Route("/v1/chat/completions", chat_completions, methods=["POST"])]


def _end(finished: Finished) -> Choice:
    return {"finish_reason": finished.reason, "stop_reason": finished.stop_string}
