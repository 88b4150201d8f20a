"""The drain: what runs is finished, nothing new is admitted, a second signal cuts short."""

import asyncio
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from headrace_chat_server.http_server import HttpServer
from headrace_chat_server.listener import bind, url_of
from headrace_chat_server.stop_signals import StopSignals
from headrace_http_api.outlet import abort_connection


class FakeGateway:
    """Its drain ends when the test says that everything ran out."""

    def __init__(self):
        self.draining = asyncio.Event()
        self.empty = asyncio.Event()
        self.timeout_s = None
        self.is_in_time = True
        self.on_close = asyncio.Event()

    async def close(self):
        self.on_close.set()

    async def drain(self, timeout_s=None):
        self.timeout_s = timeout_s
        self.draining.set()
        await self.empty.wait()
        return self.is_in_time


class Flood:
    """An answer without end, cut once its client takes no more of it."""

    async def __call__(self, scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        flood = asyncio.create_task(self._flood(send))
        await asyncio.sleep(0.1)
        assert not flood.done()
        abort_connection(scope)
        await flood

    async def _flood(self, send):
        for _ in range(1000):
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})


class Running:
    def __init__(self, listener):
        self.gateway = FakeGateway()
        self.signals = StopSignals()
        self.entered = asyncio.Event()
        self.release = asyncio.Event()
        app = Starlette(routes=[Route("/", self.answer), Route("/ping", self.ping), Route("/flood", Flood())])
        self.server = HttpServer(
            app, gateway=self.gateway, signals=self.signals, drain_timeout_s=7, log_level="critical"
        )
        self.task = asyncio.create_task(self.server.run(listener))

    async def answer(self, request):
        self.entered.set()
        await self.release.wait()
        return PlainTextResponse("whole")

    async def ping(self, request):
        return PlainTextResponse("pong")


@pytest.fixture
async def running():
    with bind("127.0.0.1", 0) as listener:
        made = Running(listener)
        made.url = url_of(listener)
        yield made
        made.release.set()
        made.server.stop()
        await made.task


async def test_a_signal_finishes_what_runs_and_then_closes(running):
    """While the gateway drains, the port stays open to say so; the running answer is whole."""
    async with httpx.AsyncClient(base_url=running.url) as client:
        request = asyncio.create_task(client.get("/"))
        await running.entered.wait()
        running.signals.take()
        await running.gateway.draining.wait()
        assert running.gateway.timeout_s == 7
        assert (await client.get("/ping")).text == "pong"
        running.release.set()
        assert (await request).text == "whole"
        running.gateway.empty.set()
        await running.task


async def test_a_second_signal_does_not_wait(running):
    """The second signal ends the server although the gateway never finishes draining."""
    async with httpx.AsyncClient(base_url=running.url) as client:
        request = asyncio.create_task(client.get("/"))
        await running.entered.wait()
        running.signals.take()
        await running.gateway.draining.wait()
        running.signals.take()
        await running.task
        running.release.set()
        await asyncio.wait({request})


async def test_stop_needs_no_signal(running):
    """A model that cannot be loaded ends the server from inside."""
    async with httpx.AsyncClient(base_url=running.url) as client:
        assert (await client.get("/ping")).text == "pong"
    running.server.stop()
    await running.task
    assert not running.gateway.draining.is_set()


async def test_the_drain_is_bounded(running):
    """When the time to drain is over, an answer that still runs is cut instead of keeping the server up."""
    async with httpx.AsyncClient(base_url=running.url) as client:
        request = asyncio.create_task(client.get("/"))
        await running.entered.wait()
        running.signals.take()
        running.gateway.empty.set()
        await running.task
        with pytest.raises(httpx.HTTPError):
            (await request).raise_for_status()


async def test_what_outlives_the_drain_is_ended_by_the_engine(running):
    """When the time to drain is over, the gateway ends what runs, so that its clients read an error and no cut line."""
    running.gateway.is_in_time = False
    async with httpx.AsyncClient(base_url=running.url) as client:
        request = asyncio.create_task(client.get("/"))
        await running.entered.wait()
        running.signals.take()
        running.gateway.empty.set()
        await running.gateway.on_close.wait()
        running.release.set()
        assert (await request).text == "whole"
        await running.task


async def test_an_aborted_connection_is_gone_although_its_client_never_reads(running):
    """What routes cut ends at once; to close the connection would wait for the client to take what is buffered."""
    place = urlsplit(running.url)
    _, writer = await asyncio.open_connection(place.hostname, place.port, limit=1)
    writer.write(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
    connections = running.server._server.server_state.connections
    async with asyncio.timeout(10):
        while not connections:  # noqa: ASYNC110 - uvicorn tells no changes
            await asyncio.sleep(0.001)
        while connections:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    writer.transport.abort()


ENDLESS_HEADS = {
    "a value": (b"GET /ping HTTP/1.1\r\nlong: ", bytes([97]) * 10_000),
    "a path": (b"GET /ping?", bytes([97]) * 10_000),
    "fields": (b"GET /ping HTTP/1.1\r\n", b"name: value\r\n" * 1000),
}


@pytest.mark.parametrize("head", ENDLESS_HEADS.values(), ids=ENDLESS_HEADS)
async def test_a_head_without_end_is_cut(running, head):
    """What a client sends before its request is whole is bounded."""
    begin, more = head
    place = urlsplit(running.url)
    _, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(begin)
    with pytest.raises(ConnectionError):  # noqa: PT012 - whichever write comes after the cut
        for _ in range(3000):
            writer.write(more)
            await writer.drain()
    writer.transport.abort()


async def test_a_long_head_in_many_pieces_is_served_whatever_its_body(running):
    """Only the head counts, however the bytes fall, and a body may be longer than the bound."""
    place = urlsplit(running.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    fields = b"".join(b"name-%d: %s\r\n" % (index, b"v" * 1000) for index in range(40))
    head = b"POST /ping HTTP/1.1\r\nhost: x\r\ncontent-length: 300000\r\n%s\r\n" % fields
    for _ in range(3):
        for begin in range(0, len(head), 500):
            writer.write(head[begin : begin + 500])
            await writer.drain()
        writer.write(b"b" * 300_000)
        async with asyncio.timeout(10):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 405 ")
            await reader.readuntil(b"Method Not Allowed")
    writer.transport.abort()
