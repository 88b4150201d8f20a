"""What a curve designer asks: how the next token's candidates spread, and samples drawn by a curve."""

import asyncio

import pytest

from headrace_http_api.curves import is_junk
from headrace_sampling import TokenLogprobs, ToneCurve
from headrace_sampling.token_logprobs import LogprobHistogram
from headrace_scheduling.errors import QueueFull
from headrace_scheduling.events import TextDelta

SIGNAL, GENERATE = "/signal", "/generate"
POINTS = [[0.01, 0.001], [50, 60]]
HISTOGRAM = LogprobHistogram(low=-4.0, counts=(3, 1), masses=(0.25, 0.5), num_below=9, mass_below=0.25)


async def test_signal(client, models):
    """One token is computed for the prompt as a chat's turn, and its step's histogram is the answer."""
    captured = TokenLogprobs(token_id=97, logprob=-0.5, top=((97, -0.5), (98, -1.5)), histogram=HISTOGRAM)
    models.gateway.script = [TextDelta("a", (97,), (captured,))]
    body = (await client.post(SIGNAL, json={"prompt": "hi"})).json()

    (asked,) = models.gateway.requests
    assert models.codec.chats == [([{"role": "user", "content": "hi"}], None)]
    assert asked.options.max_tokens == 1
    assert asked.options.ignore_eos, "the histogram is told whatever the step chose"
    assert asked.options.sampling.logprob_histogram
    assert body.pop("top") == [
        {"id": 97, "token": "a", "logprob": -0.5, "bytes": [97]},
        {"id": 98, "token": "b", "logprob": -1.5, "bytes": [98]},
    ]
    assert body == {
        "model": "org/tiny",
        "num_prompt_tokens": 3,
        "num_bins": 2,
        "low": -4.0,
        "high": 0.0,
        "counts": [3, 1],
        "masses": [0.25, 0.5],
        "below": {"count": 9, "mass": 0.25},
    }


async def test_generate_by_a_curve(client, models):
    """Each sample is a generation of its own, drawn by the curve from its own seed."""
    reply = await client.post(
        GENERATE, json={"prompt": "hi", "curve": {"points": POINTS}, "n": 2, "max_tokens": 9, "seed": 2**64 - 1}
    )
    body = reply.json()

    drawn = [one.options.sampling for one in models.gateway.requests]
    assert [one.curve for one in drawn] == [ToneCurve(points=POINTS)] * 2
    assert [one.seed for one in drawn] == [2**64 - 1, 0]
    assert {one.options.max_tokens for one in models.gateway.requests} == {9}
    assert (body["mode"], body["recipe"], body["n"], body["seed"]) == ("curve", None, 2, 2**64 - 1)
    assert body["samples"] == [
        {"text": "Hello", "junk": False, "seed": seed, "finish_reason": "stop"} for seed in (2**64 - 1, 0)
    ]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}


@pytest.mark.parametrize(
    "fields", [{}, {"curve": []}, {"curve": {"points": POINTS[:1]}}, {"curve": POINTS, "default": True}]
)
async def test_generate_by_the_defaults(client, models, fields):
    """Without a curve, with one that is not drawn yet, or when asked, the model's own recipe draws, three times."""
    body = (await client.post(GENERATE, json={"prompt": "hi"} | fields)).json()

    assert body["mode"] == "default"
    assert body["recipe"] == {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    assert len(body["samples"]) == 3
    drawn = [one.options.sampling for one in models.gateway.requests]
    assert [one.seed for one in drawn] == [body["seed"] + index for index in range(3)]
    assert {(one.temperature, one.curve) for one in drawn} == {(0.7, None)}
    assert {one.options.max_tokens for one in models.gateway.requests} == {80}


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (SIGNAL, {}, "prompt"),
        (SIGNAL, {"prompt": ["a"]}, "prompt"),
        (GENERATE, {"prompt": "a", "n": 9}, "n"),
        (GENERATE, {"prompt": "a", "n": 0}, "n"),
        (GENERATE, {"prompt": "a", "max_tokens": 257}, "max_tokens"),
        (GENERATE, {"prompt": "a", "seed": 1.5}, "seed"),
        (GENERATE, {"prompt": "a", "curve": [[1, 50], [50, 1]]}, "curve"),
        (GENERATE, {"prompt": "a", "curve": {"points": [[1, 50], [50, "x"]]}}, "curve"),
        (GENERATE, {"prompt": "a", "curve": "steep"}, "curve"),
        (GENERATE, {"prompt": "a", "default": "yes"}, "default"),
    ],
)
async def test_wrong_bodies_name_their_field(client, url, body, param):
    """A curve that falls, and every number out of its range, is a 400 with the field's path."""
    reply = await client.post(url, json=body)

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("url", [SIGNAL, GENERATE])
async def test_refusals(client, models, url):
    """Unknown models, templates that refuse, full queues: each with its own status, and nothing stays open."""
    unknown = await client.post(url, json={"prompt": "a", "model": "gpt-4"})
    models.codec.refusal = ValueError("no")
    refused = (await client.post(url, json={"prompt": "a"})).json()["error"]
    models.codec.refusal, models.gateway.refusal = None, QueueFull("full")
    full = await client.post(url, json={"prompt": "a", "colour": 1})

    assert unknown.status_code == 404
    assert (refused["code"], refused["param"]) == ("invalid_prompt", "prompt")
    assert full.status_code == 429
    assert models.num_leases == 0


async def test_a_model_without_template_reads_the_text_itself(client, models):
    """A base model gets the prompt as it is."""
    models.codec.has_chat_template = False
    assert (await client.post(GENERATE, json={"prompt": "ab", "n": 1})).status_code == 200
    assert models.gateway.requests[0].prompt_ids == (97, 98)


async def test_a_fault_ends_every_sample(client, models):
    """When one sample fails, the others are cancelled."""
    models.gateway.script = ["a", QueueFull("full"), asyncio.Event()]
    assert (await client.post(GENERATE, json={"prompt": "a"})).status_code == 429
    assert [one.closed.is_set() for one in models.gateway.generations] == [True] * 3


@pytest.mark.parametrize(
    ("text", "prompt", "junk"),
    [
        ("a plain answer, née 1999", "hi", False),
        ("", "hi", False),
        ("123 !?", "hi", False),
        ("half a \ufffd", "hi", True),
        ("x <unused12> y", "hi", True),
        ("a<|reserved_special_token_7|>", "hi", True),
        ("the cat привет", "hi", True),
        ("привет", "Как дела?", False),
        ("東京へ行く", "日本語で", False),
        ("x" * 99 + "я", "hi", False),
        ("x" * 48 + "я", "hi", True),
    ],
)
def test_junk(text, prompt, junk):
    """Replacement characters, reserved tokens, and scripts that nobody asked for."""
    assert is_junk(text, prompt) is junk
