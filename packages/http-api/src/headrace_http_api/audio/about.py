"""`/v1`, `/v1/models`, `/health`, `/ready` and `/stats` of a server that only transcribes (W-05a)."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from headrace_http_api.audio.services import AudioServices
from headrace_http_api.audio_ports import Transcriber

__all__ = ["ENDPOINTS", "about_routes"]

ENDPOINTS = (
    "POST /v1/audio/transcriptions",
    "POST /v1/audio/translations",
    "POST /v1/audio/sessions",
    "POST /v1/audio/sessions/:id/audio",
    "POST /v1/audio/sessions/:id/finish",
    "DELETE /v1/audio/sessions/:id",
    "POST /admin/transcription/unload",
    "GET /v1/models",
    "GET /health",
    "GET /stats",
    "GET /ready",
    "WS /v1/audio/live",
)


def about_routes(services: AudioServices) -> Sequence[BaseRoute]:
    """Routes that tell who serves, and how it is. None of them loads or waits for the model."""

    async def about(_request: Request) -> JSONResponse:
        transcriber = await services.transcriber()
        return JSONResponse(
            {
                "name": services.server.name,
                "version": services.server.version,
                "model": transcriber.model_id,
                "mode": "transcription",
                "endpoints": list(ENDPOINTS),
            }
        )

    async def models(_request: Request) -> JSONResponse:
        transcriber = await services.transcriber()
        card = {
            "id": transcriber.model_id,
            "object": "model",
            "created": int(services.server.started_at),
            "owned_by": "headrace",
            "transcription": True,
            "resident": transcriber.stats().is_resident,
            "capabilities": {"transcription": True, "translation": True, "chat_completions": False},
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def health(_request: Request) -> JSONResponse:
        body = _stats_body(await services.transcriber()) | {"sessions": services.sessions.num_open}
        return JSONResponse({"status": "ok", "transcription": body})

    async def ready(_request: Request) -> JSONResponse:
        await services.transcriber()
        return JSONResponse({"ready": True})

    async def stats(_request: Request) -> JSONResponse:
        transcriber = await services.transcriber()
        uptime_s = max(0.0, services.clock() - services.server.started_at)
        body = {"model": transcriber.model_id, "transcription": _stats_body(transcriber), "uptime_s": uptime_s}
        return JSONResponse(body)

    return [
        Route("/v1", about),
        Route("/v1/models", models),
        # Whatever the name: there is one model.
        Route("/v1/models/{model_id:path}", models),
        Route("/health", health),
        Route("/ready", ready),
        Route("/stats", stats),
    ]


def _stats_body(transcriber: Transcriber) -> dict[str, object]:
    stats = transcriber.stats()
    return {
        "resident": stats.is_resident,
        "loads": stats.num_loads,
        "unloads": stats.num_unloads,
        "requests": stats.num_requests,
        "last_load_ms": None if stats.last_load_s is None else round(stats.last_load_s * 1000, 1),
        "idle_unload_sec": stats.idle_unload_s,
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "failed": stats.num_failed,
        "cancelled": stats.num_cancelled,
    }
