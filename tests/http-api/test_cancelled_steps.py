"""A client that leaves costs no further step, wherever its row is: the engine here waits for the test in each step."""

import asyncio
import json
import threading
from urllib.parse import urlsplit

import pytest
from attrs import define, field

from headrace_scheduling import Cancel, GenerationGateway
from headrace_scheduling.config import EngineConfig
from headrace_scheduling.testing import FakeLoader, FakeStepRunner
from headrace_scheduling.thread_port import ThreadEnginePort

ENDLESS = 10**9
NEIGHBOUR = 1


@define
class Gate:
    """Where the engine waits in each dispatch until the test lets it through."""

    steps: list = field(factory=list)
    passes: threading.Semaphore = field(factory=lambda: threading.Semaphore(0))
    is_open: bool = False

    def __call__(self, step):
        self.steps.append(step)
        if not self.is_open:
            assert self.passes.acquire(timeout=20)

    def open(self):
        self.is_open = True
        self.passes.release(1000)

    def rows(self, step):
        return {row_id.request_id for row_id in step.decodes} | {part.row_id.request_id for part in step.prefills}


class ListeningPort(ThreadEnginePort):
    """Notes what is cancelled."""

    cancelled = ()

    def send(self, message):
        super().send(message)
        if isinstance(message, Cancel):
            self.cancelled = (*self.cancelled, message.request_id)


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
async def port(gate, models):
    """Two seats, one prompt token a step."""
    config = EngineConfig(
        loader=FakeLoader(max_positions=ENDLESS),
        make_runner=lambda loaded, config: FakeStepRunner(on_step=gate),
        max_rows=2,
        prefill_chunk=1,
        prompt_cache_bytes=0,
        max_context=ENDLESS,
    )
    port = ListeningPort(config)
    models.gateway = GenerationGateway(port, max_outstanding=8)
    await models.gateway.start()
    await models.gateway.wait_ready(30)
    yield port
    gate.open()
    await models.gateway.close()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the engine tells counts, not changes
            await asyncio.sleep(0.001)


async def post(url, *, prompt, stream):
    """Send a request on a connection of its own, which is returned."""
    place = urlsplit(url)
    _, writer = await asyncio.open_connection(place.hostname, place.port)
    body = json.dumps({"prompt": prompt, "ignore_eos": True, "stream": stream}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    await writer.drain()
    return writer


def close(writer):
    writer.close()


def half_close(writer):
    writer.write_eof()


def reset(writer):
    writer.transport.abort()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("phase", "leave"),
    [("queue", close), ("prefill", close), ("decode", half_close), ("decode", reset)],
)
async def test_a_row_is_in_no_step_after_its_client_left(base_url, port, gate, models, phase, leave, stream):
    """From the step on that follows the cancellation the row is in none, and its neighbour goes on."""
    others = [await post(base_url, prompt=[7], stream=True)]
    await until(lambda: len(gate.steps) == 1)
    if phase == "queue":
        others.append(await post(base_url, prompt=[7], stream=True))
        await until(lambda: models.gateway.stats().num_outstanding == 2)
    target = len(others) + 1
    client = await post(base_url, prompt=[7] * (2 if phase == "decode" else 50), stream=stream)
    await until(lambda: models.gateway.stats().num_outstanding == target)

    for _ in range(200):
        seen = [step for step in gate.steps if target in gate.rows(step)]
        if phase == "queue" and len(gate.steps) > 5:
            break
        if phase == "prefill" and seen:
            break
        if phase == "decode" and any(row_id.request_id == target for step in seen for row_id in step.decodes):
            break
        num_steps = len(gate.steps)
        gate.passes.release()
        await until(lambda before=num_steps: len(gate.steps) > before)

    leave(client)
    await until(lambda: port.cancelled == (target,))
    num_steps = len(gate.steps)
    gate.open()
    await until(lambda: models.gateway.stats().num_outstanding == len(others))
    await until(lambda: len(gate.steps) > num_steps + 5)

    assert not any(target in gate.rows(step) for step in gate.steps[num_steps:])
    assert any(target in gate.rows(step) for step in gate.steps) == (phase != "queue")
    assert all(NEIGHBOUR in gate.rows(step) for step in gate.steps[num_steps : num_steps + 5])
    assert models.gateway.stats().status.num_cancelled == 1
    for connection in (client, *others):
        connection.close()
    await until(lambda: models.gateway.stats().num_outstanding == 0)
    await until(lambda: models.num_leases == 0)
