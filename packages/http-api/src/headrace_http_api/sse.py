"""Server-sent events: frames, headers, and a response that closes its source when the client leaves."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing

from starlette.types import Receive, Scope, Send

from headrace_http_api.disconnect import run_until, wait_for_disconnect
from headrace_http_api.errors import ClientDisconnected
from headrace_http_api.outlet import ClientStalled, Outlet, abort_connection
from headrace_http_api.services import StreamServices

__all__ = ["DONE", "SSE_HEADERS", "EventStream", "compact_json", "frame"]

DONE = b"data: [DONE]\n\n"

# `json.dumps` with such arguments would make one for every token.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)

SSE_HEADERS: Mapping[str, str] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies of the nginx family would otherwise hold back small frames.
    "x-accel-buffering": "no",
}


def compact_json(value: object) -> str:
    """Serialise without spaces, in ASCII: some clients also split lines at U+0085, U+2028 and U+2029."""
    return _ENCODER.encode(value)


def frame(value: object) -> bytes:
    """Build one event that carries a JSON value."""
    return f"data: {compact_json(value)}\n\n".encode("ascii")


class EventStream:
    """An ASGI response that sends frames as they come.

    Owns `frames` and `resources` from its creation on: both are closed when the frames end, the client leaves or does
    not read, the server cancels the request, or sending fails, also when no frame was ever asked for.

    Args:
        services: its limits hold, and the stream is counted there.
        num_unread_tokens: how many tokens wait because their client is slow.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        resources: AsyncExitStack,
        services: StreamServices,
        num_unread_tokens: Callable[[], int],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._frames = frames
        self._resources = resources
        self._config = services.config
        self._counts = services.streams
        self._num_unread_tokens = num_unread_tokens
        merged = {**SSE_HEADERS, **(headers or {})}
        self._headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in merged.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream."""
        outlet = Outlet(send, self._config, self._num_unread_tokens)
        self._counts.num_open += 1
        try:
            async with self._resources, aclosing(self._frames):
                await self._run(scope, receive, outlet)
        finally:
            self._counts.num_open -= 1

    async def _run(self, scope: Scope, receive: Receive, outlet: Outlet) -> None:
        try:
            await run_until(
                self._send(outlet), wait_for_disconnect(receive), outlet.watch_reader(), outlet.keep_alive()
            )
        except ClientDisconnected:
            self._counts.num_left += 1
        except ClientStalled:
            self._counts.num_dropped += 1
            abort_connection(scope)
            # The server notices in its next turn, and would else complain of an answer that has no end.
            await asyncio.sleep(0)

    async def _send(self, outlet: Outlet) -> None:
        await outlet.open(self._headers)
        async for chunk in self._frames:
            await outlet.write(chunk)
        # Before the end is told: who sees it may send the next request at once.
        await self._resources.aclose()
        await outlet.close()
