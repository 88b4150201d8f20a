"""Scores of a prompt's own tokens equal one forward over the whole prompt, however it is computed."""

import asyncio
from functools import partial

import mlx.core as mx
import pytest

from headrace_sampling import SamplingParams
from headrace_scheduling import Engine, GenerateOptions, GenerationGateway, GenerationRequest, RequestShape
from headrace_scheduling.config import EngineConfig
from headrace_scheduling.prompt_scores import PromptScores
from headrace_scheduling.testing import ModelLoaderFake, ScriptedModel
from headrace_scheduling.testing.loading import FakeFacts
from headrace_scheduling.thread_port import ThreadEnginePort

_FACTS = FakeFacts(max_positions=600, eos_token_ids=frozenset())
_PROMPTS = ((5,), (7, 8, 9), tuple(range(90)), tuple(range(90, 157)))


def _expected(prompt):
    """The obvious reference: all logits at once, then the log-softmax."""
    model = ScriptedModel(_FACTS)
    logits = model.logits_from_hidden(model.forward_hidden(mx.array([prompt]), model.make_cache()))[0]
    scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return scores.tolist()


def _check(prompt, entries, num_top):
    scores = _expected(prompt)
    assert [entry.token_id for entry in entries] == list(prompt[1:])
    for entry, row in zip(entries, scores, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
        assert len(entry.top) == num_top
        assert [score for _, score in entry.top] == pytest.approx(sorted(row, reverse=True)[:num_top], abs=1e-4)


async def _run(gateway, request):
    stream = await gateway.run(gateway.place(RequestShape.of(request)), request)
    async with stream:
        first = None
        async for _ in stream:
            first = stream.prompt_logprobs if first is None else first
    return stream, first


def _request(prompt, **options):
    return GenerationRequest(prompt_ids=prompt, options=GenerateOptions(max_tokens=3, **options))


@pytest.fixture
async def open_gateway():
    opened = []

    async def start(**options):
        config = EngineConfig(loader=ModelLoaderFake(partial(ScriptedModel, _FACTS)), **options)
        opened.append(GenerationGateway(ThreadEnginePort(config)))
        await opened[-1].start()
        await opened[-1].wait_ready(30)
        return opened[-1]

    yield start
    for gateway in opened:
        await gateway.close()


@pytest.mark.parametrize("prefill_chunk", [7, 512])
async def test_scores_equal_one_forward(open_gateway, prefill_chunk):
    """In slices, in a batch with other prompts, and with choices: the same scores, there with the first delta."""
    gateway = await open_gateway(prefill_chunk=prefill_chunk)
    requests = [_request(prompt, prompt_logprobs=2, num_choices=1 + place % 2) for place, prompt in enumerate(_PROMPTS)]
    others = [_request(prompt) for prompt in _PROMPTS]
    results = await asyncio.gather(*(_run(gateway, request) for request in requests + others))

    for (stream, first), prompt in zip(results, _PROMPTS + _PROMPTS, strict=True):
        if stream in [asked for asked, _ in results[: len(requests)]]:
            assert first == stream.prompt_logprobs
            _check(prompt, stream.prompt_logprobs, 2)
        else:
            assert stream.prompt_logprobs == ()


async def test_stored_prefixes_are_not_used(open_gateway):
    """What was not computed cannot be scored: a scored prompt neither begins with a stored prefix nor stores one."""
    gateway = await open_gateway()
    prompt = _PROMPTS[2]
    await _run(gateway, _request(prompt))
    hit, _ = await _run(gateway, _request(prompt))
    scored, _ = await _run(gateway, _request(prompt, prompt_logprobs=0))

    assert hit.finished.stats.num_cached_tokens > 0
    assert scored.finished.stats.num_cached_tokens == 0
    _check(prompt, scored.prompt_logprobs, 0)


async def test_the_reply_is_the_same(open_gateway):
    """Scoring the prompt changes no token of the reply."""
    gateway = await open_gateway()
    sampling = SamplingParams(temperature=0.8, seed=3, logprobs=1)

    async def ids(**options):
        request = _request(_PROMPTS[3], sampling=sampling, **options)
        stream = await gateway.run(gateway.place(RequestShape.of(request)), request)
        async with stream:
            return [token_id async for delta in stream for token_id in delta.token_ids]

    assert await ids() == await ids(prompt_logprobs=1)


def test_a_program_without_a_loop_gets_the_scores():
    """`Engine` hands them over with the first choice of each prompt."""
    with Engine.open(ModelLoaderFake(partial(ScriptedModel, _FACTS))) as engine:
        options = GenerateOptions(max_tokens=2, num_choices=2, prompt_logprobs=1)
        results = engine.generate(_PROMPTS[1:3], options)

    for index, prompt in enumerate(_PROMPTS[1:3]):
        _check(prompt, results[2 * index].prompt_logprobs, 1)
        assert results[2 * index + 1].prompt_logprobs == ()


def test_logits_are_projected_in_pieces_of_bounded_size():
    """However long a slice and however large the vocabulary, few positions are projected at once."""
    vocab_size, sizes = 2**21, []
    prompt = tuple(range(30))

    def project(hidden):
        sizes.append(hidden.shape[1])
        return mx.broadcast_to(mx.zeros((1, 1, 1)), (1, hidden.shape[1], vocab_size))

    scores = PromptScores(prompt, 0, vocab_size)
    for length in (9, 20, 1):
        scores.take(mx.zeros((1, length, 1)), project)

    assert sum(sizes) == len(scores.entries()) == len(prompt) - 1
    assert max(sizes) * vocab_size <= 2**23


@pytest.mark.parametrize("value", [-1, 21, True, 1.0])
def test_a_wrong_number_of_candidates_is_refused(value):
    """Anything but an integer from 0 to 20 is refused by name."""
    with pytest.raises(ValueError, match="prompt_logprobs"):
        GenerateOptions(prompt_logprobs=value)
