"""The routes over the real gateway and engine loop, with a step runner that computes nothing."""

import asyncio
import json

import httpx
import pytest

from headrace_http_api import create_app, model_stats, readiness_of
from headrace_scheduling import GenerationGateway
from headrace_scheduling.config import EngineConfig
from headrace_scheduling.testing import FakeLoader, FakeRunnerFactory
from headrace_scheduling.thread_port import ThreadEnginePort

URL = "/v1/completions"


@pytest.fixture
async def gateway():
    config = EngineConfig(
        prompt_cache_bytes=0, loader=FakeLoader(max_positions=10**9), make_runner=FakeRunnerFactory(), max_context=10**9
    )
    opened = GenerationGateway(ThreadEnginePort(config), max_outstanding=2)
    await opened.start()
    await opened.wait_ready(30)
    yield opened
    await opened.close()


@pytest.fixture
def models(models, gateway):
    models.gateway = gateway
    return models


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the gateway tells counts, not changes
            await asyncio.sleep(0)


async def test_whole_and_streamed_answers_agree(base_url):
    """The same request gives the same text, reason and usage as one body and as a stream."""
    body = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    streaming = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with httpx.AsyncClient(base_url=base_url) as client:
        whole = (await client.post(URL, json=body)).json()
        stream = (await client.post(URL, json=streaming)).text

    *chunks, usage = [json.loads(part[6:]) for part in stream.split("\n\n") if part and part != "data: [DONE]"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    assert usage["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_frees_the_row_and_a_full_gateway_says_so(base_url, gateway, stream):
    """Two endless generations fill the gateway; when their clients leave, it admits again."""
    endless = {"prompt": [1], "ignore_eos": True, "stream": stream}
    async with httpx.AsyncClient(base_url=base_url) as client:
        calls = [asyncio.create_task(client.post(URL, json=endless)) for _ in range(2)]
        await until(lambda: gateway.stats().num_outstanding == 2)
        busy = readiness_of(gateway.stats())
        refused = await client.post(URL, json=endless)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: gateway.stats().num_outstanding == 0)
        admitted = await client.post(URL, json=endless | {"max_tokens": 1, "stream": False})

    assert (busy.ready, busy.status) == (False, "busy")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert admitted.status_code == 200
    assert model_stats("m", gateway.stats()).num_cancelled == 2


async def test_closed_gateway_is_a_503(services, gateway):
    """A gateway that drains admits nothing more and says when to come back."""
    await gateway.drain(10)
    transport = httpx.ASGITransport(create_app(services))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        reply = await client.post(URL, json={"prompt": [1]})

    assert reply.status_code == 503
    assert "retry-after" in reply.headers
    # A drained engine ends by itself, so either may be true by now.
    assert readiness_of(gateway.stats()).status in ("draining", "stopped")
