"""Mixed requests on a real model, a third of them cancelled at random: the others are as they are alone."""

import asyncio
import random
from functools import partial

import pytest

from headrace_models import load
from headrace_sampling import SamplingParams
from headrace_scheduling import (
    EngineConfig,
    Finished,
    GenerateOptions,
    GenerationCancelled,
    GenerationGateway,
    GenerationRequest,
    RequestShape,
    ThreadEnginePort,
)

NUM_TOKENS = 16
# Where the first difference lies behind a deciding margin of less than the tolerance, either token is right (rulings
# B-24); at most one row in a hundred, rounded up, may meet one.
MAX_NEAR_TIES = 1


def options_of(number):
    kinds = (
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=number),
        SamplingParams(temperature=1.0, top_k=40, seed=number, logprobs=2),
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.2),
        SamplingParams(temperature=0.9, top_p=0.9, seed=number),
    )
    return GenerateOptions(max_tokens=NUM_TOKENS, ignore_eos=True, sampling=kinds[number % len(kinds)])


def make_requests(count, vocab_size):
    rng = random.Random(5)
    common = tuple(rng.randrange(100, vocab_size) for _ in range(90))
    requests = []
    for number in range(count):
        own = tuple(rng.randrange(100, vocab_size) for _ in range(rng.randint(5, 120)))
        prompt = common + own if number % 4 == 0 else own
        requests.append(GenerationRequest(prompt_ids=prompt, options=options_of(number)))
    return requests


async def run_one(gateway, request, *, cancel_after=None):
    """Return the tokens of a request, and whether it finished; leave it after so many tokens."""
    tokens = []
    stream = await gateway.run(gateway.place(RequestShape.of(request)), request)
    async with stream:
        try:
            async for delta in stream:
                tokens.extend(delta.token_ids)
                if cancel_after is not None and len(tokens) >= cancel_after:
                    break
        except GenerationCancelled:
            pass
    return tokens, isinstance(stream.end_of(0), Finished)


async def idle_status(gateway):
    """Return the status once no row runs: a reply's end is told before its row is cleared away."""
    for _ in range(100):
        status = gateway.stats().status
        if status.num_running == status.num_waiting == 0:
            break
        await asyncio.sleep(0.05)
    return status


async def check_mixed_load(source, *, count, max_rows=8):
    config = EngineConfig(loader=partial(load, source), max_rows=max_rows, prefill_chunk=128)
    gateway = GenerationGateway(ThreadEnginePort(config), max_outstanding=count)
    await gateway.start()
    try:
        info = await gateway.wait_ready()
        requests = make_requests(count, min(info.vocab_size, 40_000))
        rng = random.Random(7)
        leaves = {number: rng.randint(0, NUM_TOKENS - 1) for number in rng.sample(range(count), count // 3)}
        results = await asyncio.gather(
            *(run_one(gateway, request, cancel_after=leaves.get(number)) for number, request in enumerate(requests))
        )
        status = await idle_status(gateway)
        assert status.num_running == status.num_waiting == 0
        assert status.num_submitted == status.num_finished + status.num_cancelled == count
        near_ties = 0
        for number, request in enumerate(requests):
            if number in leaves:
                assert not results[number][1] or leaves[number] >= NUM_TOKENS - 1
                continue
            alone, _ = await run_one(gateway, request)
            near_ties += results[number][0] != alone
        assert near_ties <= MAX_NEAR_TIES, f"{near_ties} of {count - len(leaves)} rows differ from themselves alone"
    finally:
        await gateway.close()


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["smollm2", "gemma3_270m"])
async def test_thirty_two_mixed_requests(name, request):
    """Law: with 32 requests of all kinds and a third cancelled, greedy and seeded rows equal themselves alone."""
    await check_mixed_load(request.getfixturevalue(name), count=32)


@pytest.mark.model
@pytest.mark.timeout(240)
async def test_nine_mixed_requests(smollm2):
    """The same in small, for every run of the model tier."""
    await check_mixed_load(smollm2, count=9, max_rows=4)
