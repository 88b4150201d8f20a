"""One stream's way to its client: comments while nothing comes, and an end for a client that does not read."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Never

from starlette.types import Message, Scope, Send

from headrace_http_api.config import ApiConfig

__all__ = ["ABORT_KEY", "KEEP_ALIVE", "ClientStalled", "Outlet", "abort_connection"]

KEEP_ALIVE = b": keep-alive\n\n"

# Where a server may put what cuts a connection without waiting for its client (in the ASGI scope's `state`).
ABORT_KEY = "headrace.abort_connection"

_LOOK_S = 1.0


class ClientStalled(Exception):
    """A client read too little for too long."""


def abort_connection(scope: Scope) -> None:
    """Cut a connection at once, where the server can; else it ends when its client reads, leaves or times out."""
    abort: Callable[[], Any] | None = scope.get("state", {}).get(ABORT_KEY)
    if abort is not None:
        abort()


class Outlet:
    """Sends one response. A send that waits means that the client, or the network, takes no more.

    Args:
        config: `keep_alive_s`, `stall_timeout_s` and `max_unread_tokens` hold.
        num_unread_tokens: how many tokens wait behind the one that is being sent.
    """

    def __init__(self, send: Send, config: ApiConfig, num_unread_tokens: Callable[[], int]) -> None:
        self._send_on = send
        self._config = config
        self._num_unread_tokens = num_unread_tokens
        self._clock = asyncio.get_running_loop().time
        self._since = self._clock()
        self._num_sending = 0
        self._is_open = False

    async def open(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send the head of the response."""
        await self._send({"type": "http.response.start", "status": 200, "headers": list(headers)})
        self._is_open = True

    async def write(self, data: bytes) -> None:
        """Send one piece of the body; waits while the client is behind."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close(self) -> None:
        """End the response."""
        self._is_open = False
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def watch_reader(self) -> Never:
        """Look at the client once a second, or more often if less time is allowed.

        Raises:
            ClientStalled: it reads nothing, or too slowly for what it asked for.
        """
        config = self._config
        look_s = min(_LOOK_S, config.stall_timeout_s / 4)
        while True:
            await asyncio.sleep(look_s)
            if self._num_sending and (
                self._clock() - self._since >= config.stall_timeout_s
                or self._num_unread_tokens() > config.max_unread_tokens
            ):
                raise ClientStalled

    async def keep_alive(self) -> Never:
        """Send a comment whenever nothing was sent for `keep_alive_s`."""
        interval_s = self._config.keep_alive_s
        if not interval_s:
            await asyncio.Event().wait()
        while True:
            rest_s = self._since + interval_s - self._clock()
            await asyncio.sleep(rest_s if rest_s > 0 else interval_s)
            if self._is_open and not self._num_sending and self._clock() - self._since >= interval_s:
                await self.write(KEEP_ALIVE)

    async def _send(self, message: Message) -> None:
        if not self._num_sending:
            self._since = self._clock()
        self._num_sending += 1
        try:
            await self._send_on(message)
        finally:
            self._num_sending -= 1
