"""`POST /v1/audio/transcriptions`, `POST /v1/audio/translations` and `POST /admin/transcription/unload`."""

from collections.abc import Sequence
from contextlib import AsyncExitStack

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from headrace_http_api.audio.fields import (
    ACCEPTED_WITHOUT_EFFECT,
    AUDIO_UNSUPPORTED,
    Task,
    TranscriptionFields,
    read_fields,
)
from headrace_http_api.audio.replies import open_take
from headrace_http_api.audio.services import AudioServices
from headrace_http_api.audio.upload import read_upload
from headrace_http_api.disconnect import run_until_disconnect
from headrace_http_api.middleware import request_id_of
from headrace_http_api.request_body import ignored_header
from headrace_http_api.sse import EventStream

__all__ = ["take_routes"]

KNOWN_WITHOUT_EFFECT = ACCEPTED_WITHOUT_EFFECT | AUDIO_UNSUPPORTED.keys()


def take_routes(services: AudioServices) -> Sequence[BaseRoute]:
    """Routes that transcribe one file, and the one that unloads the model."""

    async def transcriptions(request: Request) -> ASGIApp:
        return await _answer(request, services, "transcribe")

    async def translations(request: Request) -> ASGIApp:
        return await _answer(request, services, "translate")

    async def unload(_request: Request) -> JSONResponse:
        transcriber = await services.transcriber()
        return JSONResponse({"unloaded": await transcriber.unload()})

    return [
        Route("/v1/audio/transcriptions", transcriptions, methods=["POST"]),
        Route("/v1/audio/translations", translations, methods=["POST"]),
        Route("/admin/transcription/unload", unload, methods=["POST"]),
    ]


async def _answer(http: Request, services: AudioServices, task: Task) -> ASGIApp:
    """Serve one file. Every refusal is raised from here, before a response has started."""
    resources = AsyncExitStack()
    try:
        async with AsyncExitStack() as files:
            upload = await read_upload(http, files)
            fields = read_fields(upload.values)
            headers = ignored_header(
                upload.values, TranscriptionFields, KNOWN_WITHOUT_EFFECT, is_strict=services.strict
            )
            transcriber = await services.transcriber()
            opening = open_take(transcriber, upload.audio, fields, task, resources)
            running = await run_until_disconnect(http.receive, opening)
        if not fields.stream:
            transcript = await run_until_disconnect(http.receive, running.collect())
            response = running.response(transcript, headers)
            await resources.aclose()
            return response
    except BaseException:
        await resources.aclose()
        raise
    return EventStream(
        running.frames(request_id_of(http.scope)),
        resources=resources,
        services=services,
        num_unread_tokens=_none_unread,
        headers=headers,
    )


def _none_unread() -> int:
    """Count nothing: a take's text is small, however slow its reader."""
    return 0
