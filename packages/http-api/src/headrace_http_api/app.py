"""The application of a chat server: every group of routes, or those that are asked for."""

from collections.abc import Callable, Sequence

from attrs import evolve
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from headrace_http_api import models, observability
from headrace_http_api.assembly import assemble
from headrace_http_api.config import ApiConfig
from headrace_http_api.services import ApiServices

__all__ = ["RouteGroup", "chat_groups", "create_app"]

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
