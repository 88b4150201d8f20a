"""Tokens of a text, the text of tokens, and the prompt of a conversation, for vLLM's clients and llama.cpp's."""

import threading

import pytest

from headrace_http_api import token_requests
from headrace_http_api.errors import InvalidRequest
from headrace_http_api.token_requests import DetokenizeRequest
from headrace_http_api.validation import structure

MESSAGES = [{"role": "user", "content": "ab"}]
TOKENIZE, DETOKENIZE, TEMPLATE = "/tokenize", "/detokenize", "/apply-template"


@pytest.mark.parametrize(
    ("fields", "text", "adds_special_tokens"),
    [
        ({"prompt": "ab"}, "ab", True),
        ({"prompt": "ab", "add_special_tokens": False}, "ab", False),
        ({"content": "ab"}, "ab", False),
        ({"content": "ab", "add_special": True}, "ab", True),
        ({"content": ""}, "", False),
        ({"messages": MESSAGES}, "<user>ab<assistant>", False),
        ({"messages": MESSAGES, "add_generation_prompt": False}, "<user>ab", False),
    ],
)
async def test_tokenize(client, models, fields, text, adds_special_tokens):
    """A text or a conversation becomes ids; each server's own default says whether a start token is added."""
    asked = []

    class Codec(type(models.codec)):
        def encode(self, text, **options):
            asked.append((text, options))
            return [ord(c) for c in text]

    models.codec = Codec()
    body = (await client.post(TOKENIZE, json=fields)).json()

    assert asked == [(text, {"add_special_tokens": adds_special_tokens})]
    assert body == {"count": len(text), "max_model_len": 512, "tokens": [ord(c) for c in text], "token_strs": None}


async def test_pieces_of_tokens(client, models):
    """llama.cpp's pieces are text, or bytes where a token is part of a character; vLLM's strings are text."""

    class Codec(type(models.codec)):
        def token_bytes(self, token_id):
            return b"\xc3" if token_id == 97 else b"b"

    models.codec = Codec()
    body = (await client.post(TOKENIZE, json={"content": "ab", "with_pieces": True, "return_token_strs": True})).json()

    assert body["tokens"] == [{"id": 97, "piece": [0xC3]}, {"id": 98, "piece": "b"}]
    assert body["token_strs"] == ["\ufffd", "b"]


@pytest.mark.parametrize(("tokens", "text"), [([1, 97, 98], "\x01ab"), ([], "")])
async def test_detokenize(client, tokens, text):
    """Ids become text, special tokens by their names, under vLLM's key and llama.cpp's."""
    assert (await client.post(DETOKENIZE, json={"tokens": tokens})).json() == {"prompt": text, "content": text}


async def test_apply_template(client, models):
    """The template gets what a chat request would give it, and its text comes back, off the event loop."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"messages": MESSAGES, "tools": [tool], "chat_template_kwargs": {"x": 1}, "reasoning_effort": "low"}
    text = (await client.post(TEMPLATE, json=body)).json()
    await client.post(TEMPLATE, json=body | {"tool_choice": "none", "enable_thinking": True})

    assert text == {"prompt": "<user>ab<assistant>"}
    assert models.codec.chats[0] == (MESSAGES, {"x": 1, "add_generation_prompt": True})
    assert models.codec.chats[1][1] == {"x": 1, "enable_thinking": True, "add_generation_prompt": True}
    assert models.codec.tools == [[tool], None]
    assert models.codec.efforts == ["low", "low"]


async def test_long_texts_are_encoded_off_the_event_loop(client, models):
    """Counting a long text delays nobody's stream."""
    await client.post(TOKENIZE, json={"prompt": "x" * 5_000})
    assert models.codec.threads[0] is not threading.current_thread()


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (TOKENIZE, {}, "prompt"),
        (TOKENIZE, {"prompt": "a", "content": "b"}, "content"),
        (TOKENIZE, {"content": "a", "messages": MESSAGES}, "messages"),
        (TOKENIZE, {"prompt": 5}, "prompt"),
        (TOKENIZE, {"prompt": "a", "add_special": True, "add_special_tokens": False}, "add_special"),
        (TOKENIZE, {"prompt": "a", "with_pieces": "yes"}, "with_pieces"),
        (TOKENIZE, {"prompt": "a", "parse_special": False}, "parse_special"),
        (TOKENIZE, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (DETOKENIZE, {}, "tokens"),
        (DETOKENIZE, {"tokens": "a"}, "tokens"),
        (DETOKENIZE, {"tokens": [1, True]}, "tokens[1]"),
        (DETOKENIZE, {"tokens": [1, -1]}, "tokens[1]"),
        (DETOKENIZE, {"tokens": [1, 1000]}, "tokens[1]"),
        (TEMPLATE, {}, "messages"),
        (TEMPLATE, {"messages": []}, "messages"),
        (TEMPLATE, {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        (TEMPLATE, {"messages": MESSAGES, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools"),
    ],
)
async def test_wrong_bodies_name_their_field(client, url, body, param):
    """Every refusal is a 400 with the field's path."""
    reply = await client.post(url, json=body)

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (TOKENIZE, {"prompt": "x" * (512 * 16 + 1)}, "prompt"),
        (TOKENIZE, {"content": "x" * (512 * 16 + 1)}, "content"),
        (TOKENIZE, {"messages": [{"role": "user", "content": "x" * (512 * 16)}]}, "messages"),
        (DETOKENIZE, {"tokens": [1] * (512 * 4 + 1)}, "tokens"),
    ],
)
async def test_far_more_than_the_context_is_refused(client, models, url, body, param):
    """Before it is encoded or decoded; the message tells length, limit and remedy."""
    error = (await client.post(url, json=body)).json()["error"]

    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert error["message"].startswith(f"{param} has ")
    assert models.codec.threads == []


def test_a_list_of_ids_is_bounded_before_they_are_looked_at(monkeypatch):
    """Whatever the context of the model."""
    monkeypatch.setattr(token_requests, "MAX_IDS", 2)
    converter = token_requests.make_token_converter()

    assert structure(converter, {"tokens": [1, 2]}, DetokenizeRequest).tokens == (1, 2)
    with pytest.raises(InvalidRequest, match="tokens has 3 ids; at most 2"):
        structure(converter, {"tokens": [1, 2, 3]}, DetokenizeRequest)


@pytest.mark.parametrize("url", [TOKENIZE, TEMPLATE])
async def test_conversations_that_cannot_be_rendered(client, models, url):
    """No template, a template that refuses, and a hopelessly long text are 400s of their own."""
    models.codec.refusal = ValueError("roles must alternate")
    refused = (await client.post(url, json={"messages": MESSAGES})).json()["error"]
    models.codec.has_chat_template = False
    without = (await client.post(url, json={"messages": MESSAGES})).json()["error"]
    models.codec.has_chat_template = True
    long = [{"role": "user", "content": "x" * (512 * 256 + 1)}]
    too_long = (await client.post(url, json={"messages": long})).json()["error"]

    assert (refused["param"], refused["code"]) == ("messages", "invalid_prompt")
    assert without["code"] == "no_chat_template"
    assert too_long["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("url", "body"), [(TOKENIZE, {"prompt": "a"}), (DETOKENIZE, {"tokens": [1]}), (TEMPLATE, {"messages": MESSAGES})]
)
async def test_models_and_unknown_fields(client, models, url, body):
    """An unknown model is a 404, an unknown field is named, and the lease ends with the answer."""
    assert (await client.post(url, json=body | {"model": "gpt-4"})).status_code == 404
    assert (await client.post(url, json=body | {"colour": 1})).headers["x-headrace-ignored"] == "colour"
    assert models.num_leases == 0


async def test_tokenizer_info(client, models):
    """What a client needs to count and render by itself, by vLLM's names."""
    models.codec.template = "{{ messages }}"
    body = (await client.get("/tokenizer_info")).json()
    unknown = await client.get("/tokenizer_info", params={"model": "gpt-4"})

    assert body == {
        "model": "org/tiny",
        "model_max_length": 512,
        "vocab_size": 1000,
        "bos_token": None,
        "eos_token": "<end>",
        "pad_token": None,
        "unk_token": None,
        "chat_template": "{{ messages }}",
    }
    assert unknown.status_code == 404
