"""The routes beside the generating ones through the whole server, on a random model."""

from contextlib import asynccontextmanager

import httpx
import pytest

from headrace_chat_server.composition import compose
from headrace_chat_server.models import find_model
from headrace_chat_server.settings import build

MESSAGES = [{"role": "user", "content": "hé <|im_end|> 5"}]


@asynccontextmanager
async def serving(folder, transport):
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
    reply = await client.post(url, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_prompts_are_what_chats_read(tiny_llama):
    """A conversation's text, its tokens and a chat's own count agree, and tokens become the text again."""
    async with serving(tiny_llama, "thread") as client:
        rendered = (await post(client, "/apply-template", messages=MESSAGES))["prompt"]
        tokens = await post(client, "/tokenize", messages=MESSAGES)
        written = await post(client, "/tokenize", content=rendered, with_pieces=True)
        chat = await post(client, "/v1/chat/completions", messages=MESSAGES, max_tokens=1)
        text = await post(client, "/detokenize", tokens=tokens["tokens"])
        info = (await client.get("/tokenizer_info")).json()

    assert rendered.endswith("<|im_start|>assistant\n")
    assert text["prompt"] == rendered
    assert [one["id"] for one in written["tokens"]] == tokens["tokens"]
    assert tokens["count"] == chat["usage"]["prompt_tokens"]
    pieces = [piece.encode() if isinstance(piece, str) else bytes(piece) for piece in
              (one["piece"] for one in written["tokens"])]  # fmt: skip
    assert b"".join(pieces).decode() == rendered
    assert (info["eos_token"], info["model_max_length"]) == ("<|im_end|>", tokens["max_model_len"])


@pytest.mark.parametrize("transport", ["thread", "process"])
async def test_curves(tiny_llama, transport):
    """The histogram holds the whole vocabulary; a sample can be had again alone by its own seed."""
    curve = [[0.01, 0.001], [1, 1], [90, 95]]
    async with serving(tiny_llama, transport) as client:
        signal = await post(client, "/signal", prompt="hello")
        three = await post(client, "/generate", prompt="hello", curve=curve, max_tokens=8, seed=5)
        alone = await post(client, "/generate", prompt="hello", curve=curve, max_tokens=8, seed=7, n=1)
        default = await post(client, "/generate", prompt="hello", max_tokens=8, n=2)

    assert sum(signal["counts"]) + signal["below"]["count"] == 320
    assert sum(signal["masses"]) + signal["below"]["mass"] == pytest.approx(1, abs=1e-4)
    assert len(signal["top"]) == 20
    assert [sample["seed"] for sample in three["samples"]] == [5, 6, 7]
    assert three["samples"][2] == alone["samples"][0]
    assert len({sample["text"] for sample in three["samples"]}) == 3
    assert (default["mode"], len(default["samples"])) == ("default", 2)
