"""What the OpenAPI document says of the audio routes, where a server has them. Live dictation is a WebSocket's."""

from collections.abc import Mapping
from typing import Any

from headrace_http_api.audio.fields import TranscriptionFields
from headrace_http_api.request_schemas import Schema, request_schema
from headrace_http_api.response_schemas import reference

__all__ = ["AUDIO_PATHS", "AUDIO_SCHEMAS"]

_JSON = "application/json"
_REFUSAL: Schema = {
    "description": "Refused or failed; `param` is the path of the field at fault",
    "content": {_JSON: {"schema": reference("Error")}},
}
_SAMPLES: Schema = {"type": "string", "contentMediaType": "application/octet-stream"}
_AUDIO_TEXT: Schema = {"type": "string", "contentEncoding": "base64"}
_TEXT_TYPES = ("text/plain", "text/vtt", "application/x-subrip", "text/event-stream")


def _with_file(file: Schema) -> Schema:
    with_file = {"type": "object", "required": ["file"], "properties": {"file": file}}
    return {"allOf": [with_file, reference("TranscriptionFields")]}


def _operation(path: str, method: str, summary: str, **parts: Any) -> Schema:
    name = path.strip("/").replace("{session_id}/", "").replace("/{session_id}", "").replace("/", "_")
    status, content = parts.pop("status", "200"), parts.pop("content", {_JSON: {"schema": {"type": "object"}}})
    answer: Schema = {"description": summary} | ({"content": content} if content else {})
    described = {"operationId": f"{method}_{name}", "summary": summary, **parts}
    if "{session_id}" in path:
        parameter = {"name": "session_id", "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [parameter]
    return {method: described | {"responses": {status: answer, "default": _REFUSAL}}}


def _take(path: str, summary: str) -> Schema:
    body = {
        "required": True,
        "content": {
            "multipart/form-data": {"schema": _with_file(_SAMPLES)},
            _JSON: {"schema": _with_file(_AUDIO_TEXT)},
        },
    }
    texts = {kind: {"schema": {"type": "string"}} for kind in _TEXT_TYPES}
    content = {_JSON: {"schema": {"type": "object", "required": ["text"]}}, **texts}
    return _operation(path, "post", summary, requestBody=body, content=content)


_SESSION_BODY: Schema = {"content": {_JSON: {"schema": reference("TranscriptionFields")}}}
_PIECE_BODY: Schema = {
    "required": True,
    "content": {kind: {"schema": {}} for kind in ("application/octet-stream", "audio/*", "multipart/form-data")},
}
_SESSIONS = "/v1/audio/sessions"
_SESSION = f"{_SESSIONS}/{{session_id}}"

AUDIO_PATHS: Mapping[str, Schema] = {
    "/v1/audio/transcriptions": _take("/v1/audio/transcriptions", "Write down what is said"),
    "/v1/audio/translations": _take("/v1/audio/translations", "Write down in English what is said"),
    _SESSIONS: _operation(_SESSIONS, "post", "Begin a dictation in pieces", requestBody=_SESSION_BODY, status="201"),
    f"{_SESSION}/audio": _operation(f"{_SESSION}/audio", "post", "Send a piece of it", requestBody=_PIECE_BODY),
    f"{_SESSION}/finish": _operation(f"{_SESSION}/finish", "post", "End it and get its transcript"),
    _SESSION: _operation(_SESSION, "delete", "Drop it", status="204", content=None),
    "/admin/transcription/unload": _operation("/admin/transcription/unload", "post", "Free the model's memory"),
}
_TERMS: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
AUDIO_SCHEMAS: Mapping[str, Schema] = {
    "TranscriptionFields": request_schema(TranscriptionFields, {"vocabulary": _TERMS})
}
