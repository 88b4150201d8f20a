"""Laws of payloads on a byte stream, and of who reads what a child sends."""

import asyncio
import itertools
import os
import signal
import threading

from hypothesis import given
from hypothesis import strategies as st

from headrace_scheduling import GenerateOptions, GenerationGateway, GenerationRequest, ProcessEnginePort, RequestShape
from headrace_scheduling.errors import EngineFailed
from headrace_scheduling.framing import Unframer, frame
from headrace_scheduling.testing import fake_config

_ENDLESS = 1 << 40


@given(payloads=st.lists(st.binary(max_size=300)), data=st.data())
def test_payloads_do_not_depend_on_how_reads_fall(payloads, data):
    """Law: any cut of the framed stream gives the payloads, each once, in order, and as soon as it is whole."""
    stream = b"".join(map(frame, payloads))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    unframer = Unframer()
    read = [unframer.feed(stream[begin:end]) for begin, end in itertools.pairwise([0, *cuts, len(stream)])]
    assert [payload for some in read for payload in some] == payloads
    ends = [0, *itertools.accumulate(len(frame(payload)) for payload in payloads)]
    for place, cut in enumerate([*cuts, len(stream)]):
        whole = sum(end <= cut for end in ends) - 1
        assert sum(map(len, read[: place + 1])) == whole


def _request(max_tokens):
    return GenerationRequest(prompt_ids=tuple(b"abc"), options=GenerateOptions(max_tokens=max_tokens))


async def _run(gateway, max_tokens):
    request = _request(max_tokens)
    return await gateway.run(gateway.place(RequestShape.of(request)), request)


async def test_a_gateway_reads_its_child_on_its_own_loop():
    """Law: no thread wakes up for a step, also after the child was killed and another one took its place."""
    port = ProcessEnginePort(fake_config())
    gateway = GenerationGateway(port)
    threads = set()
    deliver = gateway._deliver

    def note(events):
        if events.rows and any(row.delta is not None for row in events.rows):
            threads.add(threading.current_thread())
        deliver(events)

    gateway._deliver = note
    await gateway.start()
    try:
        first = await gateway.wait_ready(60)
        assert "".join([delta.text async for delta in await _run(gateway, 5)]) == "abcab"
        stream = await _run(gateway, _ENDLESS)
        await anext(stream)
        os.kill(first.pid, signal.SIGKILL)
        try:
            async for _ in stream:
                pass
        except EngineFailed:
            second = await gateway.wait_ready(60)
        assert second.pid != first.pid
        assert "".join([delta.text async for delta in await _run(gateway, 5)]) == "abcab"
    finally:
        await gateway.close()
    assert threads == {threading.main_thread()}


def test_a_loop_that_is_closed_too_early_leaves_the_rest_to_the_thread():
    """Law: a port whose loop is gone can still be closed, and its child with it."""
    port = ProcessEnginePort(fake_config())

    async def start():
        gateway = GenerationGateway(port)
        await gateway.start()
        await gateway.wait_ready(60)

    asyncio.run(start())
    port.close()
    assert port.status.state == "stopped"
