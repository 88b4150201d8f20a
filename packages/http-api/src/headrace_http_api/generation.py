"""One generating request from its body to its response."""

from contextlib import AsyncExitStack
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from headrace_http_api.dialect import Dialect
from headrace_http_api.disconnect import run_until_disconnect
from headrace_http_api.generation_request import ACCEPTED_WITHOUT_EFFECT, GenerationFields
from headrace_http_api.middleware import request_id_of, tenant_of
from headrace_http_api.opening import Asked, open_generations
from headrace_http_api.request_body import ignored_header, read_body
from headrace_http_api.services import ApiServices
from headrace_http_api.sse import EventStream
from headrace_http_api.stream_answer import frames
from headrace_http_api.unsupported import refuse_unsupported
from headrace_http_api.whole_answer import collect

__all__ = ["answer"]

RequestT = TypeVar("RequestT", bound=GenerationFields)


async def answer(http: Request, services: ApiServices, dialect: Dialect[RequestT]) -> ASGIApp:
    """Serve one generating request; the response is a JSON body or an event stream.

    Every refusal is raised from here, before a response has started. The generations are closed at once when the
    client leaves, streaming or not.
    """
    body, num_bytes = await read_body(http)
    refuse_unsupported(body, dialect.unsupported)
    request = dialect.read(body)
    request.check()
    known = ACCEPTED_WITHOUT_EFFECT | dialect.unsupported.keys()
    headers = ignored_header(body, type(request), known, is_strict=services.strict)
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
    return EventStream(
        frames(running, dialect, request_id_of(http.scope)),
        resources=resources,
        services=services,
        num_unread_tokens=running.num_unread_tokens,
        headers=headers,
    )
