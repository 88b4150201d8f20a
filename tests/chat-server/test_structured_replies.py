"""Grammars, calls and log-probabilities through the whole server, on a random model that would say anything."""

import json
from contextlib import asynccontextmanager

import httpx
import pytest

from headrace_chat_server.composition import compose
from headrace_chat_server.models import find_model
from headrace_chat_server.settings import build

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "move", "parameters": SCHEMA}}
MESSAGES = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def serving(folder, transport="thread"):
    composition = compose(build({"engine.transport": transport}), find_model(str(folder)))
    await composition.start()
    try:
        await composition.wait_ready()
        app = httpx.ASGITransport(app=composition.make_app())
        async with httpx.AsyncClient(transport=app, base_url="http://localhost", timeout=60) as client:
            yield client
    finally:
        await composition.close()


async def post(client, url, **body):
    reply = await client.post(url, json={"seed": 3, "temperature": 1, "max_tokens": 150} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


def check_arguments(text):
    value = json.loads(text)
    assert set(value) == {"a", "b"}
    assert 0 <= value["a"] <= 9
    assert value["b"] in ("x", "y")


@pytest.mark.parametrize("transport", ["thread", "process"])
async def test_replies_match_what_was_asked(tiny_llama, transport):
    """Whatever the weights say: schema, regex, choice and grammar hold, for each choice, in one batch."""
    async with serving(tiny_llama, transport) as client:
        formatted = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
        choices = await post(client, CHAT_URL, messages=MESSAGES, n=3, **formatted)
        for choice in choices:
            assert choice["finish_reason"] == "stop"
            check_arguments(choice["message"]["content"])
        (choice,) = await post(client, COMPLETION_URL, prompt="hello", guided_regex="[ab]{3}-[0-9]{2}")
        assert choice["text"][3] == "-"
        (choice,) = await post(client, COMPLETION_URL, prompt="hello", structured_outputs={"choice": ["yes", "no"]})
        assert choice["text"] in ("yes", "no")
        (choice,) = await post(client, COMPLETION_URL, prompt="hello", guided_grammar='root ::= "a" | "bb"')
        assert choice["text"] in ("a", "bb")


async def test_required_calls_are_calls(tiny_llama):
    """A forced call is a call of a tool that was given, with arguments that match, whole and streamed."""
    async with serving(tiny_llama) as client:
        body = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        (choice,) = await post(client, CHAT_URL, **body)
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "move"
        check_arguments(call["function"]["arguments"])

        seeded = {"seed": 3, "temperature": 1, "max_tokens": 150, "stream": True}
        stream = (await client.post(CHAT_URL, json=body | seeded)).text
        deltas = [json.loads(part[6:])["choices"][0]["delta"] for part in stream.split("\n\n") if '"delta"' in part]
        pieces = [one["function"]["arguments"] for delta in deltas for one in delta.get("tool_calls", ())]
        assert "".join(pieces) == call["function"]["arguments"]


async def test_echoed_prompts_are_scored(tiny_llama):
    """A text's scores are those that its tokens have as the end of a reply to their beginning."""
    async with serving(tiny_llama) as client:
        body = {"prompt": "hello", "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
        view = (await post(client, COMPLETION_URL, **body))[0]["logprobs"]
        assert view["tokens"] == list("hello")
        assert view["token_logprobs"][0] is None
        last = {"prompt": "hell", "logprobs": 1, "max_tokens": 1, "temperature": 0}
        next_view = (await post(client, COMPLETION_URL, **last))[0]["logprobs"]
        assert view["top_logprobs"][-1] == pytest.approx(next_view["top_logprobs"][0], abs=1e-4)


async def test_unusable_grammars_are_refused_and_disturb_nobody(tiny_llama):
    """A grammar that cannot be compiled is the client's 400; the next request is served."""
    async with serving(tiny_llama) as client:
        refused = await client.post(COMPLETION_URL, json={"prompt": "a", "guided_regex": "(", "max_tokens": 3})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_grammar")
        await post(client, COMPLETION_URL, prompt="hello", max_tokens=3)
