"""Clients that are answered before they have sent everything."""

import asyncio
import contextlib

import httpx
import pytest

from headrace_http_api import unread_body

CHUNK = b"10000\r\n" + bytes(0x10000) + b"\r\n"


async def send_for_ever(url, path):
    """Send an endless body, and return the answer's head once the server has ended the connection."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n".encode())

    async def flood():
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(CHUNK)
                await writer.drain()

    async with asyncio.timeout(30):
        flooding = asyncio.ensure_future(flood())
        head = await reader.readuntil(b"\r\n\r\n")
        await flooding
    writer.transport.abort()
    return head.decode().lower()


@pytest.mark.parametrize(("path", "status"), [("/v1/chat/completions", 413), ("/nowhere", 404)])
async def test_an_endless_body_ends(base_url, monkeypatch, path, status):
    """The answer is delivered and says that the connection closes; then it does, however much is still sent."""
    monkeypatch.setattr(unread_body, "LINGER_S", 0.2)
    head = await send_for_ever(base_url, path)
    assert head.startswith(f"http/1.1 {status}")
    assert "connection: close" in head


async def test_an_honest_client_loses_nothing(base_url):
    """A long body that is refused unread is taken to its end, so that its client reads the answer."""
    async with httpx.AsyncClient(base_url=base_url, verify=False) as client:
        for _ in range(3):
            refused = await client.post("/nowhere", content=bytes(3_000_000))
            assert (refused.status_code, refused.headers["connection"]) == (404, "close")


async def test_short_and_read_bodies_keep_their_connection(base_url, chat_body):
    """What is read to its end, or is short, does not cost the connection."""
    async with httpx.AsyncClient(base_url=base_url, verify=False) as client:
        long = {**chat_body, "messages": [{"role": "user", "content": "a" * 100_000}]}
        for answer in (
            await client.post("/nowhere", content=bytes(1000)),
            await client.post("/v1/chat/completions", json=long),
            await client.get("/health"),
        ):
            assert "connection" not in answer.headers
