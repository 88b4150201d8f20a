"""One generating request from its body to its response."""

import asyncio
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from headrace_http_api.dialect import Dialect
from headrace_http_api.disconnect import run_until_disconnect
from headrace_http_api.errors import ClientDisconnected, InvalidRequest
from headrace_http_api.generation_request import ACCEPTED_WITHOUT_EFFECT, GenerationFields
from headrace_http_api.json_body import field_path, parse_object
from headrace_http_api.middleware import request_id_of, tenant_of
from headrace_http_api.opening import Asked, open_generations
from headrace_http_api.services import ApiServices
from headrace_http_api.sse import EventStream
from headrace_http_api.stream_answer import frames
from headrace_http_api.unsupported import refuse_unsupported
from headrace_http_api.validation import unknown_names
from headrace_http_api.whole_answer import collect

__all__ = ["IGNORED_HEADER", "answer"]

# Parsing more takes long enough to delay the streams of others: a worker thread does it.
LONG_BODY_BYTES = 64 * 1024

IGNORED_HEADER = "x-headrace-ignored"
MAX_IGNORED_NAMES = 32

RequestT = TypeVar("RequestT", bound=GenerationFields)


async def answer(http: Request, services: ApiServices, dialect: Dialect[RequestT]) -> ASGIApp:
    """Serve one generating request; the response is a JSON body or an event stream.

    Every refusal is raised from here, before a response has started. The generations are closed at once when the
    client leaves, streaming or not.
    """
    body, num_bytes = await _read_body(http)
    refuse_unsupported(body, dialect.unsupported)
    request = dialect.read(body)
    request.check()
    headers = _ignored_header(body, type(request), dialect.unsupported.keys(), is_strict=services.strict)
    asked = Asked(num_bytes, tenant_of(http.scope, request.cache_salt))
    resources = AsyncExitStack()
    try:
        opening = open_generations(services, dialect, request, asked, resources)
        running = await run_until_disconnect(http.receive, opening)
        if not request.stream:
            content = await run_until_disconnect(http.receive, collect(running, dialect))
            await resources.aclose()
            return JSONResponse(content, headers=headers)
    except BaseException:
        await resources.aclose()
        raise
    return EventStream(frames(running, dialect, request_id_of(http.scope)), resources=resources, headers=headers)


async def _read_body(http: Request) -> tuple[dict[str, Any], int]:
    """Return the parsed body and its size in bytes."""
    try:
        body = await http.body()
    except ClientDisconnect:
        raise ClientDisconnected from None
    if len(body) > LONG_BODY_BYTES:
        return await asyncio.to_thread(parse_object, body), len(body)
    return parse_object(body), len(body)


def _ignored_header(
    body: Mapping[str, Any], kind: type[GenerationFields], neutral: AbstractSet[str], *, is_strict: bool
) -> dict[str, str]:
    names = unknown_names(body, kind, ACCEPTED_WITHOUT_EFFECT | neutral)[:MAX_IGNORED_NAMES]
    if names and is_strict:
        path = field_path("", names[0])
        raise InvalidRequest(
            f"{path} is no field that this server knows, and it refuses such fields; leave it out",
            param=path,
            code="unknown_parameter",
        )
    # Percent-encoded and cut, because names come from the client and headers carry neither line ends nor much text.
    return {IGNORED_HEADER: ", ".join(quote(name[:64], safe="")[:64] for name in names)} if names else {}
