"""`POST /v1/completions`."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from headrace_http_api.completion_request import CompletionRequest, make_completion_converter
from headrace_http_api.dialect import Choice, EncodedPrompt, check_capability, check_ids
from headrace_http_api.generation import answer
from headrace_http_api.ports import ServedModel
from headrace_http_api.services import ApiServices
from headrace_http_api.unsupported import COMPLETION_UNSUPPORTED
from headrace_http_api.validation import structure
from headrace_scheduling.events import Finished

__all__ = ["CompletionDialect", "routes"]


class CompletionDialect:
    """Text completions as OpenAI shapes them; the prompt is used without a template."""

    runs_template = False
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"
    unsupported = COMPLETION_UNSUPPORTED

    def __init__(self) -> None:
        self._converter = make_completion_converter()

    def read(self, body: Mapping[str, Any]) -> CompletionRequest:
        return structure(self._converter, body, CompletionRequest)

    def num_chars(self, request: CompletionRequest) -> int:
        return len(request.prompt) if isinstance(request.prompt, str) else 0

    def encode(self, served: ServedModel, request: CompletionRequest) -> EncodedPrompt:
        check_capability(served, "completions")
        prompt = request.prompt
        ids = served.codec.encode(prompt) if isinstance(prompt, str) else prompt
        check_ids(ids, served, "prompt")
        return EncodedPrompt(ids)

    def choice(self, text: str, finished: Finished) -> Choice:
        return {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": finished.reason,
            "stop_reason": finished.stop_string,
        }

    def head_choice(self) -> Choice | None:
        return None

    def delta_choice(self, text: str) -> Choice:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": None}

    def last_choice(self, finished: Finished) -> Choice:
        return self.choice("", finished)


def routes(services: ApiServices) -> Sequence[BaseRoute]:
    """Routes of text completions."""
    dialect = CompletionDialect()

    async def completions(request: Request) -> ASGIApp:
        return await answer(request, services, dialect)

    return [Route("/v1/completions", completions, methods=["POST"])]
