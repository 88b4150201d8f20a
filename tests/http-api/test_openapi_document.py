"""The OpenAPI document says what the routes do."""

import attrs
import pytest
from starlette.routing import Route

from headrace_http_api import create_app
from headrace_http_api.chat_request import ChatRequest
from headrace_http_api.completion_request import CompletionRequest
from headrace_http_api.openapi_document import request_schema

BASES = {
    ChatRequest: {"messages": [{"role": "user", "content": "x"}]},
    CompletionRequest: {"prompt": "x", "echo": True},
}
URLS = {ChatRequest: "/v1/chat/completions", CompletionRequest: "/v1/completions"}


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


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_schema_has_every_field_of_the_request(kind):
    """The document's fields are the validated ones."""
    assert set(request_schema(kind)["properties"]) == {one.name for one in attrs.fields(kind)}


@pytest.mark.parametrize(("kind", "name", "limit", "step"), [*limits(ChatRequest), *limits(CompletionRequest)])
async def test_documented_limits_are_the_enforced_ones(client, models, kind, name, limit, step):
    """A value at a documented limit is served; one beyond it is refused."""
    models.codec.starts_in_reasoning = name.startswith("thinking_")
    at = await client.post(URLS[kind], json=BASES[kind] | {name: limit})
    beyond = await client.post(URLS[kind], json=BASES[kind] | {name: limit + step})

    assert at.status_code == 200, at.text
    assert beyond.status_code == 400
    assert beyond.json()["error"]["param"] == name
