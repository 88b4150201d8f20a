"""Several choices and several prompts: order, ranking, usage, and streams that interleave."""

import asyncio
import json

import pytest

from headrace_scheduling.errors import EngineFailed
from headrace_scheduling.events import TextDelta

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"


def chunks(text):
    events = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [json.loads(event) for event in events if event != "[DONE]"]


def texts_of(chunks):
    """Join each choice's text over a stream."""
    found = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found


async def test_n_is_one_request_with_its_choices_in_order(client, models, chat_body):
    """The prompt is submitted once; each choice is told apart, and the usage counts prompt once and replies all."""
    models.gateway.script = [TextDelta("a", (1,), (), 0), TextDelta("b", (2,), (), 1), TextDelta("c", (3,), (), 0)]
    body = (await client.post(CHAT_URL, json=chat_body | {"n": 2})).json()

    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [(0, "ac"), (1, "b")]
    (request,) = models.gateway.requests
    assert request.options.num_choices == 2
    assert models.gateway.shapes[0].num_choices == 2
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 4
    assert sorted(models.codec.remembered) == [[1, 104, 105, 1, 3], [1, 104, 105, 2]]


async def test_best_of_returns_the_likeliest_replies(client, models):
    """Of all candidates those with the best mean log-probability are returned, best first; none of it is shown."""
    models.gateway.script = [TextDelta(text, (7,), (), choice) for choice, text in enumerate("wxyz")]
    models.gateway.totals = [-3.0, -1.0, -4.0, -2.0]
    body = (await client.post(COMPLETION_URL, json={"prompt": "ab", "n": 2, "best_of": 4})).json()

    assert [(c["index"], c["text"], c["logprobs"]) for c in body["choices"]] == [(0, "x", None), (1, "z", None)]
    assert models.gateway.requests[0].options.num_choices == 4
    assert models.gateway.requests[0].options.sampling.logprobs == 0
    # What was generated is counted, whether it is returned or not.
    assert body["usage"]["completion_tokens"] == 4


async def test_best_of_n_ranks_nothing(client, models):
    """With as many candidates as replies nothing is captured and the order is that of the choices."""
    await client.post(COMPLETION_URL, json={"prompt": "ab", "n": 2, "best_of": 2, "stream": True})

    assert models.gateway.requests[0].options.sampling.logprobs is None


@pytest.mark.parametrize("stream", [True, False])
async def test_several_prompts_are_requests_of_their_own(client, models, stream):
    """Choices come prompt by prompt; text and token ids may be mixed, and the usage is the sum."""
    models.gateway.scripts = {(97,): ["A"], (98, 99): ["B", "b"], (5, 6): ["C"]}
    body = {"prompt": ["a", "bc", [5, 6]], "n": 2, "stream": stream, "stream_options": {"include_usage": True}}
    reply = await client.post(COMPLETION_URL, json=body)

    expected = {0: "A", 1: "A", 2: "Bb", 3: "Bb", 4: "C", 5: "C"}
    if stream:
        *_, last = got = chunks(reply.text)
        assert texts_of(got) == expected
        ends = [c["choices"][0]["index"] for c in got if c["choices"] and c["choices"][0]["finish_reason"]]
        assert sorted(ends) == list(range(6))
        usage = last["usage"]
        assert reply.text.endswith("data: [DONE]\n\n")
    else:
        choices = reply.json()["choices"]
        assert {c["index"]: c["text"] for c in choices} == expected
        assert [c["index"] for c in choices] == list(range(6))
        usage = reply.json()["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (5, 6)
    assert [one.prompt_ids for one in models.gateway.requests] == [(97,), (98, 99), (5, 6)]
    assert all(generation.closed.is_set() for generation in models.gateway.generations)


async def test_one_refused_prompt_refuses_all(client, models):
    """A prompt that does not fit is found before any of them is submitted."""
    reply = await client.post(COMPLETION_URL, json={"prompt": ["a", [1] * 512]})

    assert reply.status_code == 400
    assert models.gateway.requests == []


async def test_a_slow_prompt_delays_no_other(client, models):
    """While one prompt waits, the text of the others is delivered."""
    gate = asyncio.Event()
    models.gateway.scripts = {(97,): [gate, "A"], (98,): ["B"]}

    async def open_later():
        await models.gateway.waiting.wait()
        while not models.gateway.generations[1].is_over:  # noqa: ASYNC110 - the fake tells no changes
            await asyncio.sleep(0)
        gate.set()

    opening = asyncio.create_task(open_later())
    reply = await client.post(COMPLETION_URL, json={"prompt": ["a", "b"], "stream": True})
    await opening

    assert [c["choices"][0]["index"] for c in chunks(reply.text) if c["choices"][0]["text"]] == [1, 0]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_fault_of_one_prompt_ends_all(client, models, stream):
    """One failed generation is the answer's fault, and every other one is closed."""
    models.gateway.scripts = {(97,): [EngineFailed("the engine died")], (98,): ["B", asyncio.Event()]}
    reply = await client.post(COMPLETION_URL, json={"prompt": ["a", "b"], "stream": stream})

    assert "engine_failed" in reply.text
    assert "[DONE]" not in reply.text
    assert all(generation.closed.is_set() for generation in models.gateway.generations)


async def test_a_stream_of_choices_has_a_head_and_an_end_for_each(client, models, chat_body):
    """Every choice opens with the role and ends once."""
    reply = await client.post(CHAT_URL, json=chat_body | {"n": 3, "stream": True})

    got = chunks(reply.text)
    heads = [c["choices"][0]["index"] for c in got if c["choices"][0]["delta"].get("role")]
    ends = [c["choices"][0]["index"] for c in got if c["choices"][0]["finish_reason"] == "stop"]
    assert (heads, ends) == ([0, 1, 2], [0, 1, 2])
    assert texts_of(got) == {0: "Hello", 1: "Hello", 2: "Hello"}
