"""Server-sent events: frames, headers, and a response that closes its source when the client leaves."""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing, suppress

from starlette.types import Receive, Scope, Send

from headrace_http_api.disconnect import run_until_disconnect
from headrace_http_api.errors import ClientDisconnected

__all__ = ["DONE", "SSE_HEADERS", "EventStream", "compact_json", "frame"]

DONE = b"data: [DONE]\n\n"

SSE_HEADERS: Mapping[str, str] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies of the nginx family would otherwise hold back small frames.
    "x-accel-buffering": "no",
}


def compact_json(value: object) -> str:
    """Serialise without spaces, in ASCII: some clients also split lines at U+0085, U+2028 and U+2029."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def frame(value: object) -> bytes:
    """Build one event that carries a JSON value."""
    return f"data: {compact_json(value)}\n\n".encode("ascii")


class EventStream:
    """An ASGI response that sends frames as they come.

    Owns `frames` and `resources` from its creation on: both are closed when the frames end, the client leaves, the
    server cancels the request, or sending fails, also when no frame was ever asked for.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        resources: AsyncExitStack,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._frames = frames
        self._resources = resources
        merged = {**SSE_HEADERS, **(headers or {})}
        self._headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in merged.items()]

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream."""
        async with self._resources, aclosing(self._frames):
            with suppress(ClientDisconnected):
                await run_until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        async for chunk in self._frames:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
