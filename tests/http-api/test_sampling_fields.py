"""Sampling fields of OpenAI, mlx-lm, vLLM and llama.cpp, and what they become for the engine."""

import httpx
import pytest
from attrs import evolve

from headrace_http_api import create_app

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
BASES = {CHAT_URL: {"messages": [{"role": "user", "content": "x"}]}, COMPLETION_URL: {"prompt": "x"}}


async def sampling_of(client, models, url, fields):
    reply = await client.post(url, json=BASES[url] | fields)
    assert reply.status_code == 200, reply.text
    return models.gateway.requests[-1].options.sampling


@pytest.mark.parametrize("url", BASES)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"presence_penalty": 0.5, "presence_context_size": 7}, {"presence_penalty": 0.5, "presence_window": 7}),
        ({"frequency_penalty": -2, "frequency_context_size": 0}, {"frequency_penalty": -2.0, "frequency_window": 0}),
        (
            {"repetition_penalty": 1.1, "repetition_context_size": 64},
            {"repetition_penalty": 1.1, "repetition_window": 64},
        ),
        ({"repetition_penalty": 0}, {"repetition_penalty": 0.0}),
        ({"repetition_penalty": 1e-9}, {"repetition_penalty": 1e-4}),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.2}, {"xtc_probability": 0.5, "xtc_threshold": 0.2}),
        # No two tokens can both be likelier than one half.
        ({"xtc_probability": 0.5, "xtc_threshold": 0.9}, {"xtc_probability": 0.0}),
        ({"typical_p": 0.9, "top_n_sigma": 1.5}, {"typical_p": 0.9, "top_n_sigma": 1.5}),
        ({"top_n_sigma": -1}, {"top_n_sigma": 0.0}),
        (
            {"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": 100},
            {"dry_multiplier": 0.8, "dry_base": 2.0, "dry_allowed_length": 3, "dry_window": 100},
        ),
        ({"dry_multiplier": 0.8, "dry_penalty_last_n": -1}, {"dry_multiplier": 0.8, "dry_window": 16_384}),
        ({"dry_multiplier": 0.8, "dry_penalty_last_n": 0}, {"dry_multiplier": 0.0}),
        ({"min_tokens": 3}, {"min_tokens": 3}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"hlg": {"enabled": False, "width": 3}}, {"hlg": None}),
        ({}, {"presence_penalty": 0.0, "repetition_penalty": 1.0, "logprobs": None, "min_tokens": 0}),
    ],
)
async def test_fields_reach_the_sampler(client, models, url, fields, expected):
    """Each field arrives under the sampler's own name; values that mean "off" turn off."""
    params = await sampling_of(client, models, url, fields)

    assert {name: getattr(params, name) for name in expected} == expected


async def test_tone_curves_reach_the_sampler(client, models):
    """A hybrid log-gamma curve and a drawn one, as an object or as bare points."""
    hlg = {"pivot": "entropy", "width": 2, "shoulder": 3, "toe": 4, "pivot_offset": 1, "gain": None}
    curve = (await sampling_of(client, models, CHAT_URL, {"hlg": hlg})).hlg
    assert (curve.pivot, curve.width, curve.shoulder, curve.toe, curve.gain) == ("entropy", 2, 3, 4, None)

    points = [[50, 40], [1, 0.5]]
    bare = await sampling_of(client, models, CHAT_URL, {"curve": points})
    whole = await sampling_of(client, models, COMPLETION_URL, {"curve": {"points": points}})
    assert bare.curve == whole.curve
    assert bare.curve.points == ((1.0, 0.5), (50.0, 40.0))


async def test_a_deadline_reaches_the_engine(client, models):
    """`timeout_s` is the request's own time limit."""
    await client.post(CHAT_URL, json=BASES[CHAT_URL] | {"timeout_s": 2.5})

    assert models.gateway.requests[-1].timeout_s == 2.5


async def test_unknown_fields_are_refused_by_a_strict_server(services, models):
    """With `strict` a field that nobody knows is a 400 by its name; those without effect are served."""
    transport = httpx.ASGITransport(create_app(evolve(services, strict=True)))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        good = await client.post(CHAT_URL, json=BASES[CHAT_URL] | {"user": "ann", "suffix_": None, "audio": None})
        bad = await client.post(CHAT_URL, json=BASES[CHAT_URL] | {"colour": 1})

    assert good.status_code == 200, good.text
    assert (bad.status_code, bad.json()["error"]["param"], bad.json()["error"]["code"]) == (
        400,
        "colour",
        "unknown_parameter",
    )
    assert len(models.gateway.requests) == 1
