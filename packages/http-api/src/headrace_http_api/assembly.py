"""Puts routes and layers together."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute

from headrace_http_api.config import ApiConfig
from headrace_http_api.error_table import envelope
from headrace_http_api.middleware import (
    BodyLimitMiddleware,
    ErrorMiddleware,
    KeyMiddleware,
    OriginMiddleware,
    RequestIdMiddleware,
)
from headrace_http_api.unread_body import UnreadBodyMiddleware

__all__ = ["assemble"]


def assemble(routes: Sequence[BaseRoute], config: ApiConfig | None = None) -> Starlette:
    """Build an ASGI application of routes, with the checks and the error body that all of them share."""
    config = ApiConfig() if config is None else config
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: _http_error},
        middleware=[
            Middleware(UnreadBodyMiddleware),
            Middleware(RequestIdMiddleware),
            Middleware(OriginMiddleware, config),
            Middleware(ErrorMiddleware),
            Middleware(KeyMiddleware, config),
            Middleware(BodyLimitMiddleware, config),
        ],
    )
    app.router.redirect_slashes = False
    return app


async def _http_error(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, HTTPException)
    message, code = {
        404: (f"nothing is served at {request.url.path[:200]!r}; GET /v1 lists the paths", "not_found"),
        405: (f"{request.method} is not allowed at {request.url.path[:200]!r}; see Allow", "method_not_allowed"),
    }.get(exc.status_code, (exc.detail, None))
    return JSONResponse(envelope(message, code=code), status_code=exc.status_code, headers=exc.headers)
