"""Event streams over a real socket, and generations that end with their client."""

import asyncio
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
