"""The page at `/`: a few files of this package, which load nothing from elsewhere."""

from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files
from types import MappingProxyType

from attrs import frozen
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["PAGE_HEADERS", "with_page"]

_FOLDER = "page_files"
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_NAMES = ("index.html", "page.css", "page.js", "formats.js", "live.js", "samples.js", "transcript.js", "icon.svg")

PAGE_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "content-security-policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
            "media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "permissions-policy": "microphone=(self), camera=(), geolocation=()",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
)


@frozen
class _File:
    content: bytes
    headers: Mapping[str, str]


def with_page(app: ASGIApp) -> ASGIApp:
    """Serve the page in front of an application. It needs no key: it holds nothing, and asks for one if it must."""
    pages = _load()

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        found = pages.get(scope["path"]) if scope["type"] == "http" and scope["method"] in {"GET", "HEAD"} else None
        if found is None:
            await app(scope, receive, send)
            return
        is_known = Headers(scope=scope).get("if-none-match") == found.headers["etag"]
        response = Response(
            b"" if is_known or scope["method"] == "HEAD" else found.content,
            status_code=304 if is_known else 200,
            headers=dict(found.headers),
        )
        await response(scope, receive, send)

    return serve


def _load() -> Mapping[str, _File]:
    """Read the files once: they are small."""
    found: dict[str, _File] = {}
    for name in _NAMES:
        content = files("headrace_transcription_server").joinpath(_FOLDER, name).read_bytes()
        kind = f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8"
        headers = {**PAGE_HEADERS, "content-type": kind, "etag": f'"{sha256(content).hexdigest()[:32]}"'}
        found["/" if name == "index.html" else f"/page/{name}"] = _File(content, headers)
    return found
