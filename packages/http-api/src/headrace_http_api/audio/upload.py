"""The audio and the fields of a request, from a form or from JSON, before anything works on them."""

import asyncio
import base64
import binascii
import io
import shutil
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, cast

from attrs import field, frozen
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from headrace_http_api.audio.fields import form_values
from headrace_http_api.errors import ClientDisconnected, InvalidRequest, UnsupportedMediaType
from headrace_http_api.json_body import shown
from headrace_http_api.request_body import read_body

__all__ = ["AudioUpload", "media_type_of", "read_upload", "to_file"]

# Of names and texts, not of files: these stay in memory.
MAX_FIELD_BYTES = 8 * 2**20
MAX_FIELDS = 10_000
# More goes to a file.
MAX_MEMORY_BYTES = 2**20

_LONG_TEXT = 64 * 1024


@frozen(kw_only=True)
class AudioUpload:
    """What a request sent.

    Attributes:
        audio: the content of a short file, or the path of a temporary one.
        values: fields by name, as JSON has them.
    """

    audio: bytes | Path = field(repr=False)
    values: Mapping[str, Any] = field(repr=False)


async def read_upload(http: Request, resources: AsyncExitStack) -> AudioUpload:
    """Read a request's body to its end.

    Args:
        resources: owns the temporary file.

    Raises:
        UnsupportedMediaType: it is neither a form nor JSON.
        InvalidRequest: it is damaged, or has no audio.
        ClientDisconnected: the client left before its end.
    """
    match media_type_of(http):
        case "multipart/form-data":
            return await _read_form(http, resources)
        case "application/json":
            return await _read_json(http, resources)
        case other:
            raise UnsupportedMediaType(
                f"content-type is {shown(other)}; send the audio as the field file of multipart/form-data, or as "
                "base64 in application/json"
            )


def media_type_of(http: Request) -> str:
    """Return the body's type without its parameters; empty if none is told."""
    return http.headers.get("content-type", "").partition(";")[0].strip().lower()


# ---- forms ---------------------------------------------------------------------------------------------------


class _FormParser(MultiPartParser):
    """Counts the bytes of all fields: the limits of the base are for each of them."""

    num_field_bytes = 0

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._current_part.file is None:
            self.num_field_bytes += end - start
            if self.num_field_bytes > MAX_FIELD_BYTES:
                raise MultiPartException(f"the fields hold more than {MAX_FIELD_BYTES} bytes")
        super().on_part_data(data, start, end)


async def _read_form(http: Request, resources: AsyncExitStack) -> AudioUpload:
    parser = _FormParser(
        http.headers, http.stream(), max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_MEMORY_BYTES
    )
    try:
        form = await parser.parse()
    except ClientDisconnect:
        raise ClientDisconnected from None
    except MultiPartException as exc:
        raise InvalidRequest(f"the form cannot be read: {exc.message}", code="invalid_form") from None
    resources.push_async_callback(form.close)
    values = form_values([(name, value) for name, value in form.multi_items() if isinstance(value, str)])
    files = [(name, value) for name, value in form.multi_items() if isinstance(value, UploadFile)]
    if not files or files[0][0] != "file":
        raise InvalidRequest(
            "file is missing; send the audio as a file, with a file name, in the field file", param="file"
        )
    upload = files[0][1]
    if not upload.size:
        raise InvalidRequest("file is empty; send a file with sound", param="file")
    if upload.size <= MAX_MEMORY_BYTES:
        return AudioUpload(audio=await upload.read(), values=values)
    return AudioUpload(audio=await to_file(upload.file, resources), values=values)


async def to_file(source: Any, resources: AsyncExitStack) -> Path:
    """Copy an open file to a temporary one that has a name; `resources` removes it."""
    # `resources` closes it, which removes it.
    target = NamedTemporaryFile(prefix="headrace-audio-", suffix=".bin")  # noqa: SIM115
    resources.enter_context(target)
    await asyncio.to_thread(_copy, source, target)
    return Path(target.name)


def _copy(source: Any, target: Any) -> None:
    shutil.copyfileobj(source, target, MAX_MEMORY_BYTES)
    target.flush()


# ---- JSON ----------------------------------------------------------------------------------------------------


async def _read_json(http: Request, resources: AsyncExitStack) -> AudioUpload:
    body, _ = await read_body(http)
    path, text = _find_audio(body)
    if not isinstance(text, str):
        raise InvalidRequest(f"{path} is {shown(text)}; it must be base64 text, or a data URL", param=path)
    decode = asyncio.to_thread(_decode, text, path) if len(text) > _LONG_TEXT else None
    audio = _decode(text, path) if decode is None else await decode
    source = audio if len(audio) <= MAX_MEMORY_BYTES else await to_file(io.BytesIO(audio), resources)
    values = {name.removesuffix("[]"): value for name, value in body.items() if name not in _AUDIO_NAMES}
    return AudioUpload(audio=source, values=values)


_AUDIO_NAMES = frozenset({"file", "audio", "input_audio"})


def _find_audio(body: Mapping[str, Any]) -> tuple[str, Any]:
    given = [name for name in _AUDIO_NAMES if body.get(name) is not None]
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(sorted(given))} are given; send the audio once", param=min(given))
    if not given:
        raise InvalidRequest("file is missing; send the audio in it, as base64 or a data URL", param="file")
    (name,) = given
    value = body[name]
    if name != "input_audio":
        return name, value
    if not isinstance(value, dict):
        raise InvalidRequest(f"input_audio is {shown(value)}; it must be an object with data", param="input_audio")
    return "input_audio.data", cast("dict[str, Any]", value).get("data")


def _decode(text: str, path: str) -> bytes:
    if text.startswith("data:"):
        head, _, text = text.partition(",")
        if not head.endswith(";base64"):
            raise InvalidRequest(f"{path} is a data URL that is not base64; encode it so", param=path)
    try:
        audio = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{path} is not valid base64; encode the file's bytes with it", param=path) from None
    if not audio:
        raise InvalidRequest(f"{path} is empty; send a file with sound", param=path)
    return audio
