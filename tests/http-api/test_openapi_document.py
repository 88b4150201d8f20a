"""The OpenAPI document says what the routes do."""

import attrs
import httpx
import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route

from headrace_http_api import audio, create_app, openapi
from headrace_http_api.app import chat_groups
from headrace_http_api.audio import AudioServices
from headrace_http_api.chat_request import ChatRequest
from headrace_http_api.completion_request import CompletionRequest
from headrace_http_api.curve_requests import CurveRequest, SignalRequest
from headrace_http_api.openapi_audio import AUDIO_PATHS
from headrace_http_api.openapi_document import OPERATIONS, request_schema
from headrace_http_api.ports import Readiness
from headrace_http_api.token_requests import ApplyTemplateRequest, DetokenizeRequest, TokenizeRequest
from headrace_sampling import TokenLogprobs
from headrace_sampling.token_logprobs import LogprobHistogram
from headrace_scheduling.events import TextDelta

MESSAGES = [{"role": "user", "content": "x"}]
BASES = {
    ChatRequest: {"messages": MESSAGES},
    CompletionRequest: {"prompt": "x", "echo": True},
    CurveRequest: {"prompt": "x"},
}
URLS = {ChatRequest: "/v1/chat/completions", CompletionRequest: "/v1/completions", CurveRequest: "/generate"}
KINDS = [*BASES, SignalRequest, TokenizeRequest, DetokenizeRequest, ApplyTemplateRequest]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def limits(kind):
    for name, schema in request_schema(kind)["properties"].items():
        for one in schema.get("anyOf", []):
            for key, step in (("minimum", -1), ("maximum", 1)):
                if key in one:
                    yield pytest.param(kind, name, one[key], step, id=f"{kind.__name__}-{name}-{key}")


async def test_document_has_the_paths_and_methods_of_the_application(client, services):
    """Every route is in the document with its method, and nothing else is."""
    document = (await client.get("/openapi.json")).json()
    told = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}

    served = {
        (route.path.replace(":path", ""), method)
        for route in create_app(services).routes
        if isinstance(route, Route)
        for method in route.methods - {"HEAD"}
    }
    assert told == served
    assert document["info"]["version"] == "0.1.0"


async def test_audio_routes_are_in_the_document_of_a_server_that_has_them(services):
    """Mounted beside the others, they are told with their methods."""

    async def no_transcriber():
        raise AssertionError("nothing is transcribed here")

    audio_services = AudioServices(transcriber=no_transcriber, server=services.server)
    app = create_app(services, groups=[*chat_groups(), lambda _services: audio.routes(audio_services)])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8080") as client:
        document = (await client.get("/openapi.json")).json()

    told = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert told == {
        (route.path.replace(":path", ""), method)
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods - {"HEAD"}
    }


@pytest.mark.parametrize("has_audio", [False, True])
def test_document_is_whole(has_audio):
    """Each schema is one, each reference leads somewhere, each name is used, and no operation's name is given twice."""
    document = openapi(version="1", has_audio=has_audio)
    schemas = document["components"]["schemas"]

    def references(value):
        if isinstance(value, dict):
            yield from [value["$ref"]] if "$ref" in value else []
            value = list(value.values())
        if isinstance(value, list):
            for inner in value:
                yield from references(inner)

    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    assert set(references(document)) == {f"#/components/schemas/{name}" for name in schemas}
    names = [one["operationId"] for path in document["paths"].values() for one in path.values()]
    assert len(names) == len(set(names)) == len(OPERATIONS) + (len(AUDIO_PATHS) if has_audio else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_schema_has_every_field_of_the_request(kind):
    """The document's fields are the validated ones."""
    assert set(request_schema(kind)["properties"]) == {one.name for one in attrs.fields(kind)}


@pytest.mark.parametrize(("kind", "name", "limit", "step"), [one for kind in BASES for one in limits(kind)])
async def test_documented_limits_are_the_enforced_ones(client, models, kind, name, limit, step):
    """A value at a documented limit is served; one beyond it is refused."""
    models.codec.starts_in_reasoning = name.startswith("thinking_")
    at = await client.post(URLS[kind], json=BASES[kind] | {name: limit})
    beyond = await client.post(URLS[kind], json=BASES[kind] | {name: limit + step})

    assert at.status_code == 200, at.text
    assert beyond.status_code == 400
    assert beyond.json()["error"]["param"] == name


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "n": 2}),
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/completions", {"prompt": ["x", "y"]}),
        ("/v1/completions", {"prompt": "xyz", "echo": True, "logprobs": 1, "max_tokens": 0}),
        ("/tokenize", {"prompt": "ab", "return_token_strs": True}),
        ("/tokenize", {"messages": MESSAGES, "with_pieces": True}),
        ("/detokenize", {"tokens": [97]}),
        ("/apply-template", {"messages": MESSAGES}),
        ("/signal", {"prompt": "x"}),
        ("/generate", {"prompt": "x"}),
        ("/generate", {"prompt": "x", "curve": [[1, 1], [2, 2]]}),
        *((one.path, None) for one in OPERATIONS if one.body is None),
    ],
)
async def test_answers_are_as_documented(client, models, path, body):
    """Each route's answer, whatever its status, fits the schema of that status."""
    histogram = LogprobHistogram(low=-4.0, counts=(3, 1), masses=(0.25, 0.5), num_below=9, mass_below=0.25)
    captured = TokenLogprobs(token_id=97, logprob=-0.5, top=((97, -0.5),), histogram=histogram)
    if path == "/signal":
        models.gateway.script = [TextDelta("a", (97,), (captured,))]
    if body is not None and "tools" in body:
        models.gateway.script = ['<tool_call>{"name": "f", "arguments": {}}</tool_call>']
    if path == "/ready":
        models.state = Readiness(ready=False, status="busy", detail="full")
    document = (await client.get("/openapi.json")).json()
    url = path.replace("{model_id}", "org/tiny")
    reply = await (client.get(url) if body is None else client.post(url, json=body))

    responses = document["paths"][path]["get" if body is None else "post"]["responses"]
    schema = responses.get(str(reply.status_code), responses["default"])["content"]["application/json"]["schema"]
    validator = Draft202012Validator(schema | {"components": document["components"]})
    assert [error.message for error in validator.iter_errors(reply.json())] == []
