"""The OpenAPI document: what each route takes, by the classes that validate, and what it answers."""

from collections.abc import Sequence
from typing import Any, Literal

from attrs import frozen
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from headrace_http_api.chat_request import ChatRequest
from headrace_http_api.completion_request import CompletionRequest
from headrace_http_api.curve_requests import CurveRequest, SignalRequest
from headrace_http_api.openapi_audio import AUDIO_PATHS, AUDIO_SCHEMAS
from headrace_http_api.request_schemas import Schema, request_schema
from headrace_http_api.response_schemas import COMPONENTS, reference
from headrace_http_api.services import ApiServices
from headrace_http_api.token_requests import ApplyTemplateRequest, DetokenizeRequest, TokenizeRequest

__all__ = ["OPERATIONS", "Operation", "openapi", "request_schema", "routes"]

_JSON = "application/json"
_EVENTS = "text/event-stream"


@frozen
class Operation:
    """One route of the document.

    Attributes:
        path: with `{name}` for its parameters.
        answer: name of the schema of a 200.
        body: class of the request's body; None for a GET.
        streams: it can answer with events, too.
        refusals: further statuses and the names of their schemas, where they are no errors.
        query: names of its optional query parameters, which are texts.
    """

    path: str
    summary: str
    answer: str
    body: type | None = None
    streams: bool = False
    refusals: tuple[tuple[int, str], ...] = ()
    query: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        return "get" if self.body is None else "post"


OPERATIONS: tuple[Operation, ...] = (
    Operation("/v1/chat/completions", "Continue a conversation", "ChatCompletion", ChatRequest, streams=True),
    Operation("/chat/completions", "Continue a conversation", "ChatCompletion", ChatRequest, streams=True),
    Operation("/v1/completions", "Continue a text", "Completion", CompletionRequest, streams=True),
    Operation("/tokenize", "Show a text or a conversation as tokens", "Tokens", TokenizeRequest),
    Operation("/detokenize", "Show tokens as text", "DetokenizedText", DetokenizeRequest),
    Operation("/apply-template", "Show a conversation as a prompt", "RenderedPrompt", ApplyTemplateRequest),
    Operation("/tokenizer_info", "Special tokens and chat template", "TokenizerInfo", query=("model",)),
    Operation("/signal", "Show how the next token's candidates spread", "Signal", SignalRequest),
    Operation("/generate", "Draw samples by a curve", "CurveSamples", CurveRequest),
    Operation("/v1", "Name, version, default model and paths", "About"),
    Operation("/v1/models", "The served models", "Models"),
    Operation("/v1/models/{model_id}", "One served model", "Model"),
    Operation("/health", "Whether the server is well", "Health"),
    Operation("/ready", "Whether a request sent now would be admitted", "Readiness", refusals=((503, "Readiness"),)),
    Operation("/stats", "Counts of the engine", "Stats"),
    Operation("/openapi.json", "This document", "Document"),
)


def routes(services: ApiServices) -> Sequence[BaseRoute]:
    """The route of the document."""

    async def document(request: Request) -> JSONResponse:
        served = {route.path.replace(":path", "") for route in request.app.routes if isinstance(route, Route)}
        return JSONResponse(openapi(version=services.server.version, has_audio=not served.isdisjoint(AUDIO_PATHS)))

    return [Route("/openapi.json", document)]


def openapi(*, version: str, has_audio: bool = False) -> dict[str, Any]:
    """Build the OpenAPI 3.1 document of a chat server's routes.

    Args:
        version: of the server that answers.
        has_audio: whether it has the audio routes, too.
    """
    paths = {one.path: {one.method: _operation(one)} for one in OPERATIONS}
    schemas = {one.body.__name__: request_schema(one.body) for one in OPERATIONS if one.body is not None}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": version,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{}, {"key": []}],
        "paths": {**paths, **(AUDIO_PATHS if has_audio else {})},
        "components": {
            "schemas": {**schemas, **COMPONENTS, **(AUDIO_SCHEMAS if has_audio else {})},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation) -> Schema:
    name = operation.path.strip("/").replace("{model_id}", "one").replace("/", "_").replace(".", "_")
    content: Schema = {_JSON: {"schema": reference(operation.answer)}}
    if operation.streams:
        content[_EVENTS] = {"schema": {"type": "string"}}
    described: Schema = {
        "operationId": f"{operation.method}_{name.replace('-', '_')}",
        "summary": operation.summary,
        "responses": {
            "200": {"description": operation.summary, "content": content},
            **{str(status): _response("Not now", answer) for status, answer in operation.refusals},
            "default": _response("Refused or failed; `param` is the path of the field at fault", "Error"),
        },
    }
    parameters = [_parameter("model_id", "path")] if "{model_id}" in operation.path else []
    parameters += [_parameter(name, "query") for name in operation.query]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {_JSON: {"schema": reference(operation.body.__name__)}},
        }
    return described


def _parameter(name: str, place: Literal["path", "query"]) -> Schema:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}


def _response(description: str, answer: str) -> Schema:
    return {"description": description, "content": {_JSON: {"schema": reference(answer)}}}
