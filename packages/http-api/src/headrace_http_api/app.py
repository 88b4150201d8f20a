"""Puts routes and layers together."""

from collections.abc import Callable, Sequence

from attrs import evolve
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute

from headrace_http_api import models, observability
from headrace_http_api.config import ApiConfig
from headrace_http_api.error_table import envelope
from headrace_http_api.middleware import (
    BodyLimitMiddleware,
    ErrorMiddleware,
    KeyMiddleware,
    OriginMiddleware,
    RequestIdMiddleware,
)
from headrace_http_api.services import ApiServices

__all__ = ["RouteGroup", "assemble", "chat_groups", "create_app"]

RouteGroup = Callable[[ApiServices], Sequence[BaseRoute]]


def create_app(
    services: ApiServices, config: ApiConfig | None = None, *, groups: Sequence[RouteGroup] | None = None
) -> Starlette:
    """Build the ASGI application.

    Args:
        services: what the routes answer from; starting and closing it is the caller's.
        config: limits and access rules; None takes those of the services, whose defaults suit a server on loopback.
        groups: the `routes` functions to mount; None mounts every group of a chat server, which needs the extra
            `chat`. More groups may be any callable that makes Starlette routes.
    """
    services = services if config is None else evolve(services, config=config)
    groups = chat_groups() if groups is None else groups
    return assemble([route for group in groups for route in group(services)], services.config)


def assemble(routes: Sequence[BaseRoute], config: ApiConfig | None = None) -> Starlette:
    """Build an ASGI application of routes, with the checks and the error body that all of them share."""
    config = ApiConfig() if config is None else config
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: _http_error},
        middleware=[
            Middleware(RequestIdMiddleware),
            Middleware(OriginMiddleware, config),
            Middleware(ErrorMiddleware),
            Middleware(KeyMiddleware, config),
            Middleware(BodyLimitMiddleware, config),
        ],
    )
    app.router.redirect_slashes = False
    return app


def chat_groups() -> Sequence[RouteGroup]:
    """Return every route group of a chat server."""
    from headrace_http_api import chat, completions, curves, openapi_document, tokens

    return (
        chat.routes,
        completions.routes,
        tokens.routes,
        curves.routes,
        models.routes,
        observability.routes,
        openapi_document.routes,
    )


async def _http_error(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, HTTPException)
    message, code = {
        404: (f"nothing is served at {request.url.path[:200]!r}; GET /v1 lists the paths", "not_found"),
        405: (f"{request.method} is not allowed at {request.url.path[:200]!r}; see Allow", "method_not_allowed"),
    }.get(exc.status_code, (exc.detail, None))
    return JSONResponse(envelope(message, code=code), status_code=exc.status_code, headers=exc.headers)
