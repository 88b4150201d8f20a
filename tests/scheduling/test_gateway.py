"""Laws of `GenerationGateway` and `GenerationStream`."""

import asyncio

import pytest

from headrace_scheduling import (
    Cancel,
    Cancelled,
    ContextOverBudget,
    Drain,
    EngineFailed,
    EngineGone,
    EngineStatus,
    EngineUnavailable,
    Exclusive,
    Failed,
    Finished,
    GatewayClosed,
    GenerateOptions,
    GenerateStats,
    GenerationCancelled,
    GenerationGateway,
    GenerationRequest,
    OperationResult,
    ProcessEnginePort,
    QueueFull,
    RequestRefused,
    RequestShape,
    RowEvents,
    StepEvents,
    Submit,
    TextDelta,
    ThreadEnginePort,
)
from headrace_scheduling.operations import EncodeTexts, encode_texts
from headrace_scheduling.testing import FakeLoader, FakePort, fake_config
from headrace_scheduling.testing.port import fake_info

_READY = EngineStatus(state="ready")
_STATS = GenerateStats(
    num_prompt_tokens=3, num_cached_tokens=0, num_generated_tokens=2, queue_s=0.0, prefill_s=0.0, decode_s=0.0
)
_FINISHED = Finished(reason="length", stats=_STATS)


class Trace:
    def __init__(self):
        self.phases = []

    def mark(self, phase):
        self.phases.append(phase)


async def _open(*, max_outstanding=64, info=None):
    port = FakePort()
    gateway = GenerationGateway(port, max_outstanding=max_outstanding)
    await gateway.start()
    port.become_ready(info)
    await gateway.wait_ready(5)
    return port, gateway


async def _run(gateway, *, num_prompt_tokens=3, trace=None, **options):
    placement = gateway.place(RequestShape(num_prompt_tokens=num_prompt_tokens, max_tokens=options.get("max_tokens")))
    request = GenerationRequest(prompt_ids=tuple(range(num_prompt_tokens)), options=GenerateOptions(**options))
    return await gateway.run(placement, request, trace=trace)


def _publish(port, stream, *, text=None, end=None, admitted=False):
    delta = None if text is None else TextDelta(text, tuple(text.encode()))
    row = RowEvents(request_id=stream.request_id, admitted=admitted, delta=delta, end=end)
    port.publish(StepEvents(status=_READY, rows=(row,)))


async def _turn():
    """Let everything that is ready on the loop run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_stream_yields_deltas_then_ends():
    """Law: deltas in order, then the end with its statistics; the trace sees each phase once."""
    port, gateway = await _open()
    trace = Trace()
    stream = await _run(gateway, trace=trace, max_tokens=2)
    assert port.sent == [
        Submit(
            request_id=stream.request_id,
            request=GenerationRequest(prompt_ids=(0, 1, 2), options=GenerateOptions(max_tokens=2)),
            max_tokens=2,
        )
    ]
    with pytest.raises(RuntimeError, match="not finished"):
        _ = stream.finished
    _publish(port, stream, admitted=True)
    _publish(port, stream, text="a")
    assert await anext(stream) == TextDelta("a", (97,))
    _publish(port, stream, text="b", end=_FINISHED)
    assert [delta async for delta in stream] == [TextDelta("b", (98,))]
    assert stream.finished is _FINISHED
    assert trace.phases == ["submitted", "admitted", "first_delta", "ended"]
    assert gateway.stats().num_outstanding == 0


async def test_a_slow_consumer_costs_one_coalesced_delta():
    """Law: what came while the consumer was away is one delta with all its tokens."""
    port, gateway = await _open()
    stream = await _run(gateway)
    for text in ("one ", "two ", "three"):
        _publish(port, stream, text=text)
    _publish(port, stream, end=_FINISHED)
    await _turn()
    assert stream.num_unread_tokens == len("one two three")
    (delta,) = [delta async for delta in stream]
    assert delta == TextDelta("one two three", tuple(b"one two three"))
    assert stream.num_unread_tokens == 0


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (Failed(code="engine_failed", message="it died"), EngineFailed),
        (Failed(code="request_failed", message="no text"), RequestRefused),
        (Failed(code="context_over_budget", message="too long"), RequestRefused),
        (Cancelled(), GenerationCancelled),
    ],
)
async def test_failures_are_raised_after_the_text_that_came_before(end, error):
    """Law: text that was delivered before a failure is yielded, then the failure is raised."""
    port, gateway = await _open()
    stream = await _run(gateway)
    _publish(port, stream, text="partial")
    _publish(port, stream, end=end)
    assert (await anext(stream)).text == "partial"
    with pytest.raises(error):
        await anext(stream)
    await stream.aclose()
    assert not any(isinstance(message, Cancel) for message in port.sent)


async def test_leaving_early_cancels_and_waits_for_the_row():
    """Law: leaving the block sends one Cancel and returns only when the engine has let the row go."""
    port, gateway = await _open()

    async def consume():
        async with await _run(gateway) as stream:
            streams.append(stream)
            await anext(stream)

    streams = []
    task = asyncio.create_task(consume())
    await _turn()
    (stream,) = streams
    _publish(port, stream, text="a")
    await _turn()
    assert port.sent[-1] == Cancel(stream.request_id)
    assert not task.done()
    assert gateway.stats().num_outstanding == 1
    _publish(port, stream, end=Cancelled())
    await task
    assert gateway.stats().num_outstanding == 0
    assert port.sent.count(Cancel(stream.request_id)) == 1


async def test_cancelling_the_consumer_waits_shielded():
    """Law: a cancelled task ends only after the row's end, however often it is cancelled, and ends cancelled."""
    port, gateway = await _open()
    stream = await _run(gateway)

    async def consume():
        async for _ in stream:
            pass

    task = asyncio.create_task(consume())
    await _turn()
    for _ in range(3):
        task.cancel()
        await _turn()
        assert not task.done()
    assert port.sent.count(Cancel(stream.request_id)) == 1
    _publish(port, stream, end=Cancelled())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stream.is_ended


async def test_the_wait_ends_when_the_engine_dies():
    """Law: waiting for a row's end is bounded by the engine's death."""
    port, gateway = await _open()
    stream = await _run(gateway)
    task = asyncio.create_task(stream.aclose())
    await _turn()
    assert not task.done()
    port.close()
    await asyncio.wait_for(task, 5)


async def test_the_queue_has_a_limit():
    """Law: beyond `max_outstanding` a request is refused, and admitted again when one has ended."""
    port, gateway = await _open(max_outstanding=2)
    first, _second = await _run(gateway), await _run(gateway)
    assert not gateway.stats().accepting
    with pytest.raises(QueueFull, match="2 requests"):
        await _run(gateway)
    _publish(port, first, end=_FINISHED)
    await _turn()
    assert gateway.stats().accepting
    await _run(gateway)


@pytest.mark.parametrize(
    ("shape", "max_tokens"),
    [
        (RequestShape(num_prompt_tokens=10), 90),
        (RequestShape(num_prompt_tokens=10, max_tokens=5), 5),
        (RequestShape(num_prompt_tokens=10, max_tokens=500), 90),
        (RequestShape(num_prompt_tokens=99), 1),
    ],
)
async def test_placement_clamps_to_the_context(shape, max_tokens):
    """Law: the placement carries the very shape and a limit within the context's remainder."""
    _, gateway = await _open(info=fake_info(max_context=100))
    placement = gateway.place(shape)
    assert placement.max_tokens == max_tokens
    assert placement.shape is shape
    assert (placement.mechanism, placement.plan.reasons) == ("continuous", ())


async def test_placement_refuses_what_can_never_run():
    """Law: an empty prompt and one at the context's end are refused with the numbers."""
    _, gateway = await _open(info=fake_info(max_context=100))
    with pytest.raises(RequestRefused, match="at least 1"):
        gateway.place(RequestShape(num_prompt_tokens=0))
    with pytest.raises(ContextOverBudget, match="100 tokens") as caught:
        gateway.place(RequestShape(num_prompt_tokens=100))
    assert (caught.value.num_prompt_tokens, caught.value.max_context) == (100, 100)


async def test_one_row_means_serial():
    """Law: with `max_rows` 1 a request is placed serial, with the reason, whatever else it asks."""
    port, gateway = await _open(info=fake_info(max_rows=1))
    placement = gateway.place(RequestShape(num_prompt_tokens=3))
    assert (placement.mechanism, placement.plan.reasons) == ("serial", ("max-rows-is-1",))
    await _run(gateway)
    assert port.sent[-1].serial


async def test_a_placement_fits_only_its_request():
    """Law: a request of another length than was placed is refused."""
    _, gateway = await _open()
    placement = gateway.place(RequestShape(num_prompt_tokens=3))
    with pytest.raises(RequestRefused, match="place it again"):
        await gateway.run(placement, GenerationRequest(prompt_ids=(1,)))


async def test_an_engine_that_is_not_ready_is_unavailable():
    """Law: while loading, restarting or failed, placing is refused with the state and why."""
    port = FakePort()
    gateway = GenerationGateway(port)
    await gateway.start()
    with pytest.raises(EngineUnavailable, match="loading"):
        gateway.place(RequestShape(num_prompt_tokens=1))
    with pytest.raises(EngineUnavailable, match="not ready after"):
        await gateway.wait_ready(0.01)
    port.become_ready()
    placement = gateway.place(RequestShape(num_prompt_tokens=1))
    port.publish(StepEvents(status=EngineStatus(state="restarting", detail="killed")))
    with pytest.raises(EngineUnavailable, match="restarting: killed") as passing:
        gateway.place(RequestShape(num_prompt_tokens=1))
    with pytest.raises(EngineUnavailable, match="restarting: killed"):
        await gateway.run(placement, GenerationRequest(prompt_ids=(1,)))
    assert not isinstance(passing.value, EngineGone)
    assert not gateway.stats().accepting
    port.publish(StepEvents(status=EngineStatus(state="failed", detail="gone")))
    with pytest.raises(EngineGone, match="failed: gone"):
        await gateway.wait_ready()
    with pytest.raises(EngineGone, match="failed: gone"):
        gateway.place(RequestShape(num_prompt_tokens=1))


async def test_stats_follow_the_last_published_status_at_once():
    """Law: stats show what was published even before the loop has delivered it."""
    port, gateway = await _open()
    port.publish(StepEvents(status=EngineStatus(state="ready", num_running=3, num_waiting=2)))
    stats = gateway.stats()
    assert (stats.status.num_running, stats.status.num_waiting) == (3, 2)
    assert stats.info == port.info
    assert (stats.max_outstanding, stats.closed, stats.accepting) == (64, False, True)


async def test_operations_return_their_value_or_raise():
    """Law: an operation's outcome reaches its caller."""
    port, gateway = await _open()
    task = asyncio.create_task(gateway.run_exclusive("swap"))
    await _turn()
    operation = port.sent[-1]
    assert operation == Exclusive(operation.operation_id, "swap")
    port.publish(StepEvents(status=_READY, operations=(OperationResult(operation_id=operation.operation_id, value=7),)))
    assert await task == 7
    task = asyncio.create_task(gateway.run_preparation("read"))
    await _turn()
    operation_id = port.sent[-1].operation_id
    port.publish(StepEvents(status=_READY, operations=(OperationResult(operation_id=operation_id, error="no"),)))
    with pytest.raises(EngineFailed, match="no"):
        await task


async def test_drain_refuses_new_work_and_waits():
    """Law: from the first moment of a drain nothing is admitted; it returns when nothing is outstanding."""
    port, gateway = await _open()
    stream = await _run(gateway)
    assert not await gateway.drain(0.01)
    assert isinstance(port.sent[-1], Drain)
    with pytest.raises(GatewayClosed):
        gateway.place(RequestShape(num_prompt_tokens=1))
    with pytest.raises(GatewayClosed):
        await gateway.run_exclusive("swap")
    _publish(port, stream, end=_FINISHED)
    assert await gateway.drain(5)
    assert gateway.stats().closed


async def test_close_ends_streams():
    """Law: closing ends every stream as cancelled, and can be repeated."""
    port, gateway = await _open()
    stream = await _run(gateway)
    await gateway.close()
    await gateway.close()
    with pytest.raises(GenerationCancelled):
        await anext(stream)
    assert port.is_closed


def test_events_after_the_loop_are_dropped():
    """Law: an engine that outlives the event loop raises nothing."""

    async def start():
        port = FakePort()
        await GenerationGateway(port).start()
        return port

    asyncio.run(start()).become_ready()


def test_a_limit_below_one_is_refused():
    """Law: a gateway that could never admit is a mistake."""
    with pytest.raises(ValueError, match="at least 1"):
        GenerationGateway(FakePort(), max_outstanding=0)


@pytest.mark.parametrize("kind", [ThreadEnginePort, ProcessEnginePort])
async def test_many_streams_over_a_real_port(kind):
    """Law: concurrent streams over an engine each get their own text; one that is left early hurts no other."""
    port = kind(fake_config(handlers={EncodeTexts: encode_texts}, loader=FakeLoader(max_positions=100_000)))
    gateway = GenerationGateway(port)
    await gateway.start()
    await gateway.wait_ready(60)

    async def generate(prompt, num_tokens):
        (ids,) = await gateway.run_preparation(EncodeTexts((prompt,)))
        placement = gateway.place(RequestShape(num_prompt_tokens=len(ids), max_tokens=num_tokens))
        request = GenerationRequest(prompt_ids=ids, options=GenerateOptions(max_tokens=num_tokens))
        async with await gateway.run(placement, request) as stream:
            return "".join([delta.text async for delta in stream])

    async def leave(prompt):
        placement = gateway.place(RequestShape(num_prompt_tokens=1))
        async with await gateway.run(placement, GenerationRequest(prompt_ids=tuple(prompt.encode()))) as stream:
            await anext(stream)

    prompts = [f"prompt {n} é " for n in range(12)]
    texts, _ = await asyncio.gather(asyncio.gather(*(generate(p, 2 * len(p.encode())) for p in prompts)), leave("x"))
    assert texts == [prompt * 2 for prompt in prompts]
    assert gateway.stats().num_outstanding == 0
    assert gateway.stats().status.num_cancelled == 1
    await gateway.close()
