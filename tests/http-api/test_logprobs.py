"""Log-probabilities: whole and streamed, in chats and completions, of replies and of echoed prompts."""

import json

import pytest

from headrace_scheduling.events import TextDelta

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"


def chunks(text):
    events = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [json.loads(event) for event in events if event != "[DONE]"]


@pytest.mark.parametrize(
    ("fields", "num_top"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 2}, 2),
        # As clients of mlx-lm ask.
        ({"top_logprobs": 2}, 2),
        ({"logprobs": True, "top_logprobs": -1}, 0),
        ({"logprobs": False, "top_logprobs": 0}, None),
    ],
)
async def test_chat(client, models, chat_body, fields, num_top):
    """OpenAI's list of tokens with their bytes and candidates, and mlx-lm's id beside them."""
    choice = (await client.post(CHAT_URL, json=chat_body | fields)).json()["choices"][0]

    assert models.gateway.requests[0].options.sampling.logprobs == num_top
    if num_top is None:
        assert choice["logprobs"] is None
        return
    content = choice["logprobs"]["content"]
    assert len(content) == 3
    top = [{"id": 7 + i, "token": chr(7 + i), "logprob": -0.5 - i, "bytes": [7 + i]} for i in range(num_top)]
    assert content[0] == {"id": 7, "token": "\x07", "logprob": -0.5, "bytes": [7], "top_logprobs": top}


@pytest.mark.parametrize("url", [CHAT_URL, COMPLETION_URL])
async def test_streamed_equals_whole(client, models, chat_body, url):
    """The pieces of a stream put together are the whole answer's, for tokens with and without text of their own."""
    base = chat_body if url == CHAT_URL else {"prompt": "ab", "logprobs": 2}
    body = base | {"logprobs": True if url == CHAT_URL else 2, "n": 2}
    models.gateway.script = ["a", "", "bc", ""]
    whole = (await client.post(url, json=body)).json()["choices"]
    models.gateway.script = ["a", "", "bc", ""]
    stream = chunks((await client.post(url, json=body | {"stream": True})).text)

    for index in range(2):
        pieces = [c["choices"][0]["logprobs"] for c in stream if c["choices"][0]["index"] == index]
        joined = {}
        for piece in pieces:
            for name, entries in (piece or {}).items():
                joined[name] = joined.get(name, []) + entries if entries is not None else None
        assert joined == whole[index]["logprobs"]
        assert len(joined["content" if url == CHAT_URL else "tokens"]) == 4


@pytest.mark.parametrize(("fields", "num_top"), [({"logprobs": 2}, 2), ({"logprobs": 0}, 0), ({"logprobs": True}, 0)])
async def test_completion(client, models, fields, num_top):
    """Parallel lists over the tokens."""
    choice = (await client.post(COMPLETION_URL, json={"prompt": "ab"} | fields)).json()["choices"][0]

    view = choice["logprobs"]
    assert view["tokens"] == ["\x07"] * 3
    assert view["token_logprobs"] == [-0.5] * 3
    assert view["text_offset"] == [0, 1, 2]
    assert view["top_logprobs"] == [{"\x07": -0.5, "\x08": -1.5} if num_top else None] * 3
    assert models.gateway.requests[0].options.prompt_logprobs is None


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
async def test_echo_repeats_the_prompt_with_its_scores(client, models, stream, prompt):
    """The prompt's text and tokens come first; its first token has no log-probability."""
    models.gateway.script = ["c"]
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "stream": stream}
    reply = await client.post(COMPLETION_URL, json=body)

    choices = [c["choices"][0] for c in chunks(reply.text)] if stream else reply.json()["choices"]
    assert "".join(c["text"] for c in choices) == "abc"
    assert [token for c in choices for token in c["logprobs"]["tokens"]] == ["a", "b", "\x07"]
    assert [lp for c in choices for lp in c["logprobs"]["token_logprobs"]] == [None, -0.5, -0.5]
    assert [at for c in choices for at in c["logprobs"]["text_offset"]] == [0, 1, 2]
    assert models.gateway.requests[0].options.prompt_logprobs == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_max_tokens_0_gives_the_prompt_alone(client, models, stream):
    """Scores of a text: nothing of the one token that the engine samples is told or counted."""
    models.gateway.script = ["x"]
    body = {"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream}
    reply = await client.post(COMPLETION_URL, json=body | {"stream_options": {"include_usage": True}})

    bodies = chunks(reply.text) if stream else [reply.json()]
    choices = [c for body in bodies for c in body["choices"]]
    assert "".join(c["text"] for c in choices) == "ab"
    assert [token for c in choices for token in c["logprobs"]["tokens"]] == ["a", "b"]
    assert choices[-1]["finish_reason"] == "length"
    assert bodies[-1]["usage"]["completion_tokens"] == 0
    assert models.gateway.requests[0].options.max_tokens == 1


async def test_echo_without_logprobs_scores_nothing(client, models):
    """The text alone costs no scoring."""
    reply = await client.post(COMPLETION_URL, json={"prompt": "ab", "echo": True, "stream": True})

    assert "".join(c["choices"][0]["text"] for c in chunks(reply.text)) == "abHello"
    assert models.gateway.requests[0].options.prompt_logprobs is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": "2"}, "logprobs"),
        ({"logprobs": 2, "top_logprobs": 3}, "top_logprobs"),
        ({"echo": 1}, "echo"),
    ],
)
async def test_contradictions_are_refused(client, fields, param):
    """A wrong or contradicting value is a 400 by its name."""
    reply = await client.post(COMPLETION_URL, json={"prompt": "ab"} | fields)

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


async def test_log_probabilities_wait_for_their_text(client, models, chat_body):
    """A token whose text is held back brings its log-probability with the next text, never alone."""
    models.gateway.script = [TextDelta("", (1,), ()), "a"]
    stream = chunks((await client.post(CHAT_URL, json=chat_body | {"logprobs": True, "stream": True})).text)

    assert [c["choices"][0]["delta"] for c in stream if c["choices"][0]["logprobs"]] == [{"content": "a"}]
