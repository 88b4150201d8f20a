"""`/v1/audio/sessions`: a dictation that is sent in pieces, its transcript at the end (W-25)."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import SpooledTemporaryFile

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from headrace_http_api.audio.endpoints import KNOWN_WITHOUT_EFFECT
from headrace_http_api.audio.fields import SESSION_FORMATS, TranscriptionFields, read_fields
from headrace_http_api.audio.formats import segment_body, transcript_body, word_body
from headrace_http_api.audio.registry import Session
from headrace_http_api.audio.replies import vocabulary_body
from headrace_http_api.audio.services import AudioServices
from headrace_http_api.audio.session import Dictation, new_tracker
from headrace_http_api.audio.transcripts import JoinedTranscript, Segment
from headrace_http_api.audio.upload import MAX_MEMORY_BYTES, media_type_of, read_upload, to_file
from headrace_http_api.audio_ports import SAMPLE_RATE, Pcm, Transcriber
from headrace_http_api.errors import ClientDisconnected, InvalidRequest, PayloadTooLarge, UnsupportedMediaType
from headrace_http_api.json_body import shown
from headrace_http_api.request_body import ignored_header, read_optional_body

__all__ = ["session_routes"]

# Samples stay in memory: a quarter of an hour in one piece.
MAX_PCM_BYTES = 64 * 2**20

_PCM_TYPES = frozenset({"", "application/octet-stream", "audio/pcm", "audio/l32"})
_UPLOAD_TYPES = frozenset({"multipart/form-data", "application/json"})


def session_routes(services: AudioServices) -> Sequence[BaseRoute]:
    """Routes of sessions."""
    registry = services.sessions

    async def create(request: Request) -> JSONResponse:
        body = await read_optional_body(request)
        fields = read_fields(body, formats=SESSION_FORMATS)
        if fields.stream:
            raise InvalidRequest("stream is true; a session answers each request whole", param="stream")
        headers = ignored_header(body, TranscriptionFields, KNOWN_WITHOUT_EFFECT, is_strict=services.strict)
        transcriber = await services.transcriber()
        options = fields.options("transcribe")
        transcriber.check(options)
        dictation = Dictation(transcriber, options, new_tracker(transcriber, options))
        session = registry.open(dictation, fields)
        content = {
            "id": session.id,
            "object": "audio.session",
            "created": int(services.clock()),
            "model": transcriber.model_id,
            "response_format": fields.response_format,
            "vocabulary": list(options.vocabulary),
        }
        return JSONResponse(content, status_code=201, headers=headers)

    async def audio(request: Request) -> JSONResponse:
        session = registry.get(request.path_params["session_id"])
        session.rearm()
        async with AsyncExitStack() as files:
            pcm = await _read_chunk(request, session.dictation.transcriber, files)
        segments = await session.feed(pcm)
        content = {
            "samples": len(pcm.data) // 4,
            "duration": round(session.dictation.duration_s, 3),
            "speech": session.dictation.hears_speech,
            "segments": _segments(segments, session.dictation.segments, session.fields),
        }
        return JSONResponse(content)

    async def finish(request: Request) -> JSONResponse:
        session = registry.get(request.path_params["session_id"])
        transcript = await session.finish()
        return JSONResponse(_whole(session, transcript), headers={"x-headrace-language": transcript.language})

    async def delete(request: Request) -> Response:
        registry.get(request.path_params["session_id"]).close()
        return Response(status_code=204)

    return [
        Route("/v1/audio/sessions", create, methods=["POST"]),
        Route("/v1/audio/sessions/{session_id}/audio", audio, methods=["POST"]),
        Route("/v1/audio/sessions/{session_id}/finish", finish, methods=["POST"]),
        Route("/v1/audio/sessions/{session_id}", delete, methods=["DELETE"]),
    ]


def _whole(session: Session, transcript: JoinedTranscript) -> dict[str, object]:
    fields = session.fields
    is_verbose = fields.response_format == "verbose_json"
    body = transcript_body(transcript, task="transcribe", is_verbose=is_verbose, has_words=fields.wants_words)
    details = {
        "model": session.dictation.transcriber.model_id,
        "language": transcript.language,
        "duration": round(transcript.duration_s, 3),
        "vocabulary": vocabulary_body(transcript),
    }
    return body | {"headrace": details}


def _segments(
    fresh: Sequence[Segment], every: Sequence[Segment], fields: TranscriptionFields
) -> list[dict[str, object]]:
    first = len(every) - len(fresh)
    bodies = [segment_body(place, one) for place, one in enumerate(fresh, start=first)]
    if fields.wants_words:
        for body, segment in zip(bodies, fresh, strict=True):
            body["words"] = [word_body(word) for word in segment.words]
    return bodies


# ---- a piece of audio ----------------------------------------------------------------------------------------


async def _read_chunk(http: Request, transcriber: Transcriber, files: AsyncExitStack) -> Pcm:
    """Read samples, or a file whose samples are read by the service.

    Raises:
        InvalidRequest: the samples are of another rate, or cut in the middle of one.
        UnsupportedMediaType: it is neither samples nor audio.
    """
    kind = media_type_of(http)
    if kind in _UPLOAD_TYPES:
        return Pcm((await transcriber.read((await read_upload(http, files)).audio)).data)
    if kind in _PCM_TYPES:
        _check_rate(http)
        return await _read_samples(http)
    if not kind.startswith(("audio/", "video/")):
        raise UnsupportedMediaType(
            f"content-type is {shown(kind)}; send samples as application/octet-stream, a file as audio/*, or a form"
        )
    return Pcm((await transcriber.read(await _read_file(http, files))).data)


async def _read_samples(http: Request) -> Pcm:
    data = bytearray()
    try:
        async for chunk in http.stream():
            data += chunk
            if len(data) > MAX_PCM_BYTES:
                raise PayloadTooLarge(f"the piece is larger than the limit of {MAX_PCM_BYTES} bytes; send smaller ones")
    except ClientDisconnect:
        raise ClientDisconnected from None
    if len(data) % 4:
        raise InvalidRequest(
            f"the piece has {len(data)} bytes; samples are float32, little-endian, four bytes each",
            code="invalid_audio",
        )
    return Pcm(bytes(data))


async def _read_file(http: Request, files: AsyncExitStack) -> bytes | Path:
    # `files` closes it.
    spooled = SpooledTemporaryFile(max_size=MAX_MEMORY_BYTES)  # noqa: SIM115
    files.enter_context(spooled)
    num_bytes = 0
    try:
        async for chunk in http.stream():
            num_bytes += len(chunk)
            await asyncio.to_thread(spooled.write, chunk)
    except ClientDisconnect:
        raise ClientDisconnected from None
    if not num_bytes:
        raise InvalidRequest("the body is empty; send samples, or a file with sound", code="invalid_audio")
    spooled.seek(0)
    return spooled.read() if num_bytes <= MAX_MEMORY_BYTES else await to_file(spooled, files)


def _check_rate(http: Request) -> None:
    given = {"sample_rate": http.query_params.get("sample_rate")}
    for part in http.headers.get("content-type", "").split(";")[1:]:
        name, _, text = part.strip().partition("=")
        if name.lower() == "rate":
            given["rate"] = text
    for name, text in given.items():
        if text is not None and text != str(SAMPLE_RATE):
            raise InvalidRequest(
                f"{name} is {shown(text)}; samples are taken at {SAMPLE_RATE} a second: convert them, or send a file",
                param=name,
            )
