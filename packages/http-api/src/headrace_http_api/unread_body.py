"""Ends connections whose client still sends when its answer is complete: endless bodies would be taken in for ever."""

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["UnreadBodyMiddleware"]

# A shorter body is not worth a connection: the server passes over it.
SHORT_BODY_BYTES = 64 * 1024
# Closing at once would reset the connection, and the client might lose the answer that it has not read yet.
LINGER_S = 2.0


class UnreadBodyMiddleware:
    """Closes the connection after an answer that came before the end of the request's body.

    The client has `LINGER_S` to stop after it got the whole answer; what it sends meanwhile is dropped.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http" or not _may_be_long(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        is_read = False

        async def watching_receive() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body", False)
            return message

        async def drop() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while not is_read:
                        await watching_receive()
                        # What is there already is received without waiting, and the time would never be up.
                        await asyncio.sleep(0)

        async def closing_send(message: Message) -> None:
            if is_read:
                await send(message)
            elif message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
                await send(message)
            elif message.get("more_body", False):
                await send(message)
            else:
                # The server closes at the end of the answer, so its last part waits.
                await send({**message, "more_body": True})
                await drop()
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app(scope, watching_receive, closing_send)


def _may_be_long(headers: Headers) -> bool:
    length = headers.get("content-length", "")
    return "transfer-encoding" in headers or (length.isdecimal() and int(length[:20]) > SHORT_BODY_BYTES)
