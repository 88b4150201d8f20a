"""Pure ASGI layers around the routes: request id, origins and hosts, errors, API keys, body limit.

Pure ASGI, because Starlette's function-style middleware would buffer between a stream and its client.
"""

import hashlib
import hmac
import re
import uuid
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_http_api.config import ApiConfig
from headrace_http_api.error_table import reply_to
from headrace_http_api.errors import Forbidden, NotAuthenticated, PayloadTooLarge

__all__ = [
    "BodyLimitMiddleware",
    "ErrorMiddleware",
    "KeyMiddleware",
    "OriginMiddleware",
    "RequestIdMiddleware",
    "request_id_of",
    "tenant_of",
]

REQUEST_ID_HEADER = "x-request-id"
OPEN_PATHS = frozenset({"/health", "/ready"})
AUDIO_PATHS = "/v1/audio/"
EXPOSED_HEADERS = f"{REQUEST_ID_HEADER}, x-headrace-ignored, x-headrace-language, retry-after, server-timing"

_SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_READING_METHODS = frozenset({"GET", "HEAD"})
_CONNECTIONS = frozenset({"http", "websocket"})
_KEY_SUBPROTOCOL = "openai-insecure-api-key."


def request_id_of(scope: Scope) -> str:
    """Return the id that `RequestIdMiddleware` gave this request."""
    return scope.get("state", {}).get("request_id", "-")


class RequestIdMiddleware:
    """Gives each request an id, the client's own if it is a plain one, and returns it in `x-request-id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] not in _CONNECTIONS:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if _SAFE_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        await self._app(scope, receive, _with_headers(send, {REQUEST_ID_HEADER: request_id}))


class OriginMiddleware:
    """Keeps foreign web pages out: CORS for allowed origins only, and no host name that is not expected.

    CORS alone hides an answer from a page but still runs the request, so a writing request from a foreign origin is
    refused, and a WebSocket, to which CORS does not apply. The Host check stops a page whose own DNS name was pointed
    at this machine.
    """

    def __init__(self, app: ASGIApp, config: ApiConfig) -> None:
        self._app = app
        self._origins = frozenset(origin.rstrip("/").lower() for origin in config.allowed_origins)
        self._hosts = None if config.allowed_hosts is None else frozenset(h.lower() for h in config.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] not in _CONNECTIONS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        try:
            self._check_host(headers.get("host"))
            is_allowed = origin is None or self._check_origin(origin, scope, headers)
        except Forbidden as exc:
            await _refuse(exc, scope, receive, send)
            return
        if scope["type"] == "websocket" or origin is None or not is_allowed:
            await self._app(scope, receive, send)
            return
        cors = {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": EXPOSED_HEADERS,
            "vary": "Origin",
        }
        send = _with_headers(send, cors)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight_response(headers)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check_host(self, host: str | None) -> None:
        # Browsers always send Host; what comes without one is an old tool, not a page.
        if self._hosts is None or host is None or _host_name(host) in self._hosts:
            return
        allowed = ", ".join(sorted(self._hosts))
        raise Forbidden(
            f"this server does not answer for the host {host[:100]!r}; it answers for {allowed}. "
            "Call it by one of these names, or allow yours in its settings",
            code="host_not_allowed",
        )

    def _check_origin(self, origin: str, scope: Scope, headers: Headers) -> bool:
        # A page's origin is http or https, also where it opens a WebSocket.
        scheme = scope["scheme"].replace("ws", "http")
        own = f"{scheme}://{headers.get('host', '')}".lower()
        if "*" in self._origins or origin.lower() in self._origins or origin.lower() == own:
            return True
        if scope["type"] == "http" and scope["method"] in _READING_METHODS:
            return False
        raise Forbidden(
            f"pages of the origin {origin[:100]!r} may not call this server; its setting allowed-origins lists who may",
            code="origin_not_allowed",
        )


class ErrorMiddleware:
    """Turns every exception from the layers inside into OpenAI's error body, by the one error table."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] not in _CONNECTIONS:
            await self._app(scope, receive, send)
            return
        is_started = False

        async def watching_send(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._app(scope, receive, watching_send)
        except Exception as exc:  # noqa: BLE001 - the last border: what nobody expected becomes a 500
            # Once it has started, the server sees an unfinished response and cuts the connection.
            if is_started:
                reply_to(exc, request_id_of(scope))
            else:
                await _refuse(exc, scope, receive, send)


def tenant_of(scope: Scope, salt: str | None) -> str | None:
    """Name whose stored prefixes a request may use: those of its API key and of the salt that it gives.

    A prefix that is found is answered sooner, which would tell one user what another one has sent.
    """
    key: bytes = scope.get("state", {}).get("api_key", b"")
    if not key and salt is None:
        return None
    return hashlib.sha256(key + b"\0" + (salt or "").encode()).hexdigest()


class KeyMiddleware:
    """Asks for `Authorization: Bearer KEY` when keys are set; `/health` and `/ready` stay open.

    A page cannot set headers of a WebSocket; it may send the key as the subprotocol that OpenAI has for this.
    """

    def __init__(self, app: ASGIApp, config: ApiConfig) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in config.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection.

        Raises:
            NotAuthenticated: no key, or none that is known.
        """
        if scope["type"] in _CONNECTIONS and self._keys and scope["path"] not in OPEN_PATHS:
            given = Headers(scope=scope).get("authorization") or _subprotocol_key(scope)
            scope.setdefault("state", {})["api_key"] = self._check(given)
        await self._app(scope, receive, send)

    def _check(self, authorization: str | None) -> bytes:
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise NotAuthenticated(
                "this server asks for an API key; send it as the header `Authorization: Bearer KEY`",
                code="missing_api_key",
            )
        # Headers are latin-1; every key is compared, so that time tells nothing about which one is near.
        sent = given.strip().encode("latin-1")
        matches = [hmac.compare_digest(sent, key) for key in self._keys]
        if True not in matches:
            raise NotAuthenticated("the API key is not known to this server; check it for typing errors")
        return sent


class BodyLimitMiddleware:
    """Refuses a body above the limit, by its declared length at once and by its real length while reading."""

    def __init__(self, app: ASGIApp, config: ApiConfig) -> None:
        self._app = app
        self._max_body_bytes = config.max_body_bytes
        self._max_audio_bytes = config.max_audio_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection.

        Raises:
            PayloadTooLarge: from here, or from `receive` where the route reads.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        max_bytes = self._max_audio_bytes if scope["path"].startswith(AUDIO_PATHS) else self._max_body_bytes
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > max_bytes:
            raise _too_large(max_bytes)
        num_bytes = 0

        async def limited_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            return message

        await self._app(scope, limited_receive, send)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than the limit of {max_bytes} bytes; send less")


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.http.response.start"):
            MutableHeaders(scope=message).update(headers)
        await send(message)

    return sending


def _subprotocol_key(scope: Scope) -> str | None:
    offered: list[str] = scope.get("subprotocols", [])
    for name in offered:
        if name.startswith(_KEY_SUBPROTOCOL):
            return "Bearer " + name.removeprefix(_KEY_SUBPROTOCOL)
    return None


async def _refuse(exc: Exception, scope: Scope, receive: Receive, send: Send) -> None:
    response = _error_response(exc, scope)
    if scope["type"] == "http" or "websocket.http.response" in scope.get("extensions", {}):
        # Starlette sends a response to a WebSocket as the refusal of its handshake.
        await response(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1008})


def _error_response(exc: Exception, scope: Scope) -> Response:
    reply = reply_to(exc, request_id_of(scope))
    return JSONResponse(reply.body, status_code=reply.status, headers=reply.headers)


def _preflight_response(headers: Headers) -> Response:
    allowed = {
        "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
        "access-control-allow-headers": headers.get("access-control-request-headers", "authorization, content-type"),
        "access-control-max-age": "600",
    }
    return Response(status_code=204, headers=allowed)


def _host_name(host: str) -> str:
    """Drop the port: `[::1]:8080` gives `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
