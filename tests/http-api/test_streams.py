"""Event streams over a real socket, and generations that end with their client."""

import asyncio
import json
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace_http_api import ApiConfig, create_app
from headrace_http_api.outlet import ABORT_KEY
from headrace_http_api.services import StreamCounts
from headrace_http_api.sse import frame
from headrace_scheduling.errors import EngineFailed, QueueFull

CHAT_URL = "/v1/chat/completions"


def events(text):
    """Split a stream into the payloads of its events."""
    return [part.removeprefix("data: ") for part in text.split("\n\n") if part]


def chunks(text):
    return [json.loads(event) for event in events(text) if event != "[DONE]"]


async def test_stream_has_one_head_one_end_and_done(base_url, models, chat_body):
    """A stream opens with the role, carries the text, ends once with a reason, and is closed by [DONE]."""
    async with httpx.AsyncClient(base_url=base_url) as client:
        reply = await client.post(CHAT_URL, json=chat_body | {"stream": True})

    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert events(reply.text)[-1] == "[DONE]"
    got = chunks(reply.text)
    assert [chunk["choices"][0]["delta"] for chunk in got] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in got] == [None, None, None, "stop"]
    assert len({chunk["id"] for chunk in got}) == 1
    assert {chunk["object"] for chunk in got} == {"chat.completion.chunk"}
    assert not any("usage" in chunk for chunk in got)
    assert models.num_leases == 0
    assert models.gateway.generations[0].closed.is_set()


async def test_usage_chunk_comes_only_when_asked_for(base_url, chat_body):
    """`include_usage` adds one chunk without choices after the end, and null usage everywhere else."""
    body = chat_body | {"stream": True, "stream_options": {"include_usage": True}}
    async with httpx.AsyncClient(base_url=base_url) as client:
        reply = await client.post(CHAT_URL, json=body)

    *others, last = chunks(reply.text)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 6
    assert [chunk["usage"] for chunk in others] == [None] * 4


async def test_completion_stream_has_no_head(base_url, models):
    """Text completions stream bare text, and tell the matched stop string at the end."""
    models.gateway.stop_string = "#"
    async with httpx.AsyncClient(base_url=base_url) as client:
        reply = await client.post("/v1/completions", json={"prompt": "ab", "stream": True})

    assert [(c["choices"][0]["text"], c["choices"][0].get("stop_reason")) for c in chunks(reply.text)] == [
        ("Hel", None),
        ("lo", None),
        ("", "#"),
    ]


@pytest.mark.parametrize("fault", [EngineFailed("the engine died"), KeyError("secret prompt")])
async def test_fault_in_a_stream_is_one_error_event_and_no_done(base_url, models, chat_body, caplog, fault):
    """A started stream tells its fault in the table's words and breaks off; nothing leaks into the log."""
    models.gateway.script = ["Hel", fault]
    async with httpx.AsyncClient(base_url=base_url) as client:
        reply = await client.post(CHAT_URL, json=chat_body | {"stream": True})

    *_, last = events(reply.text)
    assert json.loads(last)["error"]["type"] == "server_error"
    assert "[DONE]" not in reply.text
    assert "secret" not in reply.text + caplog.text
    assert models.num_leases == 0


async def test_refusal_before_the_stream_has_a_status(base_url, models, chat_body):
    """A full queue is a 429 with Retry-After, not an event in a stream that looked admitted."""
    models.gateway.refusal = QueueFull("64 requests are outstanding")
    async with httpx.AsyncClient(base_url=base_url) as client:
        reply = await client.post(CHAT_URL, json=chat_body | {"stream": True})

    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "1"
    assert reply.json()["error"]["code"] == "queue_full"
    assert models.num_leases == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_generation_ends_when_its_client_leaves(base_url, models, chat_body, stream):
    """Closing the connection closes the generation at once and gives the lease back, streaming or not."""
    models.gateway.script = ["Hel", asyncio.Event()]
    async with httpx.AsyncClient(base_url=base_url) as client:
        call = asyncio.create_task(client.post(CHAT_URL, json=chat_body | {"stream": stream}))
        await models.gateway.waiting.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

        await asyncio.wait_for(models.gateway.generations[0].closed.wait(), 5)


async def test_neighbour_streams_on_while_bad_requests_are_refused(base_url, models, chat_body):
    """A running stream is not disturbed by malformed and oversized requests beside it."""
    gate = asyncio.Event()
    models.gateway.script = ["Hel", gate, "lo"]
    bad = [b"{", b"\xff", b"[" * 10_000, b'{"messages": []}', b"x" * 50_000_000]
    async with httpx.AsyncClient(base_url=base_url, timeout=30) as client:
        neighbour = asyncio.create_task(client.post(CHAT_URL, json=chat_body | {"stream": True}))
        await models.gateway.waiting.wait()
        statuses = [(await client.post(CHAT_URL, content=body)).status_code for body in bad]
        gate.set()
        reply = await neighbour

    assert statuses == [400, 400, 400, 400, 413]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks(reply.text)) == "Hello"
    assert events(reply.text)[-1] == "[DONE]"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=6))
async def test_any_text_survives_the_stream(client, models, chat_body, texts):
    """What the engine yields is what a client reads, for every character, and each frame is one event."""
    models.gateway.script = texts

    reply = await client.post(CHAT_URL, json=chat_body | {"stream": True})

    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks(reply.text)) == "".join(texts)
    assert len(reply.text.splitlines()) == 2 * len(events(reply.text))


def test_frame_is_ascii_on_one_line():
    """A frame never holds what some client takes for a line end."""
    assert frame({"a": "x\n\r\u2028\u0085"}) == b'data: {"a":"x\\n\\r\\u2028\\u0085"}\n\n'


# ---- silence and slow readers --------------------------------------------------------------------------------


async def test_silence_is_filled_with_comments_and_nothing_else_changes(make_url, models, chat_body):
    """While nothing is generated comments come, before and between texts; clients read the same events."""
    gate = asyncio.Event()
    models.gateway.script = [gate, "Hel", gate, "lo"]
    url = await make_url(keep_alive_s=0.01)
    text = ""
    body = chat_body | {"stream": True}
    async with httpx.AsyncClient(base_url=url) as client, client.stream("POST", CHAT_URL, json=body) as reply:
        async for piece in reply.aiter_text():
            text += piece
            if text.count(": keep-alive\n\n") == 3:
                gate.set()

    parts = [part for part in text.split("\n\n") if part]
    told = [part.removeprefix("data: ") for part in parts if not part.startswith(":")]
    assert len(parts) - len(told) == parts.count(": keep-alive") >= 3
    assert told[-1] == "[DONE]"
    assert [json.loads(one)["choices"][0]["delta"].get("content") for one in told[:-1]] == ["", "Hel", "lo", None]


async def test_no_comments_where_none_are_wanted_or_needed(make_url, models, chat_body):
    """An interval of 0 sends none, and a stream that is never silent for long has none."""
    for interval_s in (0, 60):
        models.gateway.script = ["Hel", "lo"]
        url = await make_url(keep_alive_s=interval_s)
        async with httpx.AsyncClient(base_url=url) as client:
            reply = await client.post(CHAT_URL, json=chat_body | {"stream": True})
        assert ":" not in [part[0] for part in reply.text.split("\n\n") if part]


class StuckClient:
    """An ASGI client that takes so many messages and then no more."""

    def __init__(self, body, *, num_read):
        self.num_left = num_read
        self.body = [json.dumps(body).encode()]
        self.is_cut = asyncio.Event()
        self.messages = []

    async def run(self, app):
        scope = {
            "type": "http",
            "method": "POST",
            "path": CHAT_URL,
            "headers": [],
            "query_string": b"",
            "scheme": "http",
            "http_version": "1.1",
            "asgi": {"version": "3.0"},
            "state": {ABORT_KEY: self.is_cut.set},
        }
        await app(scope, self._receive, self._send)

    async def _receive(self):
        if not self.body:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self.body.pop(), "more_body": False}

    async def _send(self, message):
        if not self.num_left:
            await asyncio.Event().wait()
        self.num_left -= 1
        self.messages.append(message)


@pytest.mark.parametrize(
    ("limits", "num_unread"),
    [({"stall_timeout_s": 0.05}, 0), ({"stall_timeout_s": 0.2, "max_unread_tokens": 10}, 11)],
    ids=["time", "tokens"],
)
@pytest.mark.parametrize("num_read", [0, 1, 3])
async def test_client_that_does_not_read_is_dropped(services, models, chat_body, limits, num_unread, num_read):
    """Too long without reading, or too much unread: the row is cancelled, the connection cut, the stream counted."""
    models.gateway.script = ["Hel"] * 10
    models.gateway.num_unread_tokens = num_unread
    client = StuckClient(chat_body | {"stream": True}, num_read=num_read)

    await asyncio.wait_for(client.run(create_app(services, ApiConfig(keep_alive_s=0.01, **limits))), 5)

    assert models.gateway.generations[0].closed.is_set()
    assert client.is_cut.is_set()
    assert models.num_leases == 0
    assert not any(message.get("more_body") is False for message in client.messages)
    assert services.streams == StreamCounts(num_dropped=1)


async def test_client_that_never_reads_its_socket_is_dropped(make_url, services, models):
    """What fits into the buffers of sockets and server is sent; then the row ends, and others are served."""
    models.gateway.script = ["x" * 100_000] * 1000
    place = urlsplit(await make_url(stall_timeout_s=0.1))
    _, writer = await asyncio.open_connection(place.hostname, place.port, limit=1)
    body = b'{"prompt": "a", "stream": true}'
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    async with asyncio.timeout(10):
        while services.streams != StreamCounts(num_dropped=1):  # noqa: ASYNC110 - counts tell no changes
            await asyncio.sleep(0.01)
    generation = models.gateway.generations[0]
    writer.transport.abort()

    assert generation.closed.is_set()
    assert 0 < generation.num_deltas < 500
    assert models.num_leases == 0


async def test_client_that_is_only_behind_is_waited_for(services, models, chat_body):
    """Below both limits a client may take its time; the stream then goes on to its end."""
    models.gateway.script = ["Hel"] * 3
    models.gateway.num_unread_tokens = 10
    client = StuckClient(chat_body | {"stream": True}, num_read=2)
    app = create_app(services, ApiConfig(stall_timeout_s=30.0, max_unread_tokens=10))
    blocked = asyncio.Event()
    send = client._send

    async def send_late(message):
        if not client.num_left:
            await asyncio.sleep(0.1)
            blocked.set()
            client.num_left = 100
        await send(message)

    client._send = send_late
    await asyncio.wait_for(client.run(app), 5)

    assert blocked.is_set()
    assert client.messages[-1]["more_body"] is False
    assert services.streams == StreamCounts()


async def test_streams_are_counted(make_url, services, models, chat_body):
    """Open streams are a gauge; a client that leaves is counted once, and not as dropped."""
    models.gateway.script = ["Hel", asyncio.Event()]
    url = await make_url()
    async with httpx.AsyncClient(base_url=url) as client:
        call = asyncio.create_task(client.post(CHAT_URL, json=chat_body | {"stream": True}))
        await models.gateway.waiting.wait()
        during = (await client.get("/stats")).json()["server"]["streams"]
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.wait_for(models.gateway.generations[0].closed.wait(), 5)
        while services.streams.num_open:  # noqa: ASYNC110 - counts tell no changes
            await asyncio.sleep(0)
        after = (await client.get("/stats")).json()["server"]["streams"]

    assert during == {"open": 1, "left": 0, "dropped": 0}
    assert after == {"open": 0, "left": 1, "dropped": 0}
