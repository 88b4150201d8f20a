"""`GET /v1/models` and `GET /v1/models/{id}`."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from headrace_http_api.errors import ModelNotFound
from headrace_http_api.ports import ModelCard
from headrace_http_api.services import ApiServices

__all__ = ["routes"]


def routes(services: ApiServices) -> Sequence[BaseRoute]:
    """Routes that list the served models."""

    async def list_models(_request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [_card_body(card) for card in services.models.cards()]})

    async def get_model(request: Request) -> JSONResponse:
        name = request.path_params["model_id"]
        for card in services.models.cards():
            if card.name == name:
                return JSONResponse(_card_body(card))
        raise ModelNotFound(name)

    # `:path`, because a hub id holds a slash.
    return [Route("/v1/models", list_models), Route("/v1/models/{model_id:path}", get_model)]


def _card_body(card: ModelCard) -> dict[str, object]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "context_window": card.max_context,
        "capabilities": {
            "chat_completions": "chat" in card.capabilities,
            "completions": "completions" in card.capabilities,
        },
    }
