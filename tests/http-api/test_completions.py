"""Text completions."""

import pytest

URL = "/v1/completions"


async def test_answer_has_openai_shape(client):
    """A whole answer carries text, reason and usage."""
    body = (await client.post(URL, json={"prompt": "ab", "max_tokens": 4})).json()

    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert body["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("prompt", "ids"), [("ab", (97, 98)), (["ab"], (97, 98)), ([5, 999], (5, 999)), ([[5, 6]], (5, 6))]
)
async def test_prompt_is_text_or_ids(client, models, prompt, ids):
    """A string, a list of one string, token ids, and a list of one list of ids are one prompt each."""
    assert (await client.post(URL, json={"prompt": prompt})).status_code == 200
    assert models.gateway.requests[0].prompt_ids == ids


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        (["a", 5], "prompt[1]"),
        (["a", ""], "prompt[1]"),
        (["a", [5, 1000]], "prompt[1][1]"),
        (["a"] * 65, "prompt"),
        ([[]], "prompt[0]"),
        ([5, "a"], "prompt[1]"),
        ([5, True], "prompt[1]"),
        ([-1], "prompt[0]"),
        ([5, 1000], "prompt[1]"),
        ([[2**70]], "prompt[0]"),
        ({"a": 1}, "prompt"),
        (5, "prompt"),
    ],
)
async def test_other_prompts_are_refused(client, prompt, param):
    """Anything else is a 400 that names the entry."""
    reply = await client.post(URL, json={"prompt": prompt})

    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


async def test_prompt_at_the_context_is_refused(client):
    """A prompt that leaves no room for a token says how long it is and what fits."""
    reply = await client.post(URL, json={"prompt": [1] * 512})

    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "512" in error["message"]


@pytest.mark.parametrize(("name", "value"), [("suffix", "x"), ("use_beam_search", True)])
async def test_unserved_fields_are_refused(client, name, value):
    """What would change the answer is refused by name."""
    error = (await client.post(URL, json={"prompt": "a", name: value})).json()["error"]

    assert (error["code"], error["param"]) == ("unsupported_parameter", name)
