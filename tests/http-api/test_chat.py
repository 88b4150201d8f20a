"""Chat completions: shapes, options and refusals."""

import asyncio
import threading

import pytest

URL = "/v1/chat/completions"


async def test_answer_has_openai_shape(client, models, chat_body):
    """A whole answer carries text, reason and usage in OpenAI's shape, and the lease is given back."""
    reply = await client.post(URL, json=chat_body)

    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body == {
        "object": "chat.completion",
        "created": 1_700_000_060,
        "model": "org/tiny",
        "system_fingerprint": "fp_0123456789ab",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    assert models.num_leases == 0
    assert models.gateway.generations[0].closed.is_set()


async def test_request_options_reach_the_engine(client, models, chat_body):
    """Every served field arrives in the engine's request; what is not given takes the model's default."""
    options = {
        "max_tokens": 5,
        "max_completion_tokens": 9,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 10**9,
        "min_p": 0.1,
        "seed": -1,
        "stop": ["a", "b"],
        "logit_bias": {"5": -100, "7": 1.5},
        "ignore_eos": True,
        "timeout_s": 2,
    }
    assert (await client.post(URL, json=chat_body | options)).status_code == 200
    assert (await client.post(URL, json=chat_body | {"stop": "x", "model": None})).status_code == 200

    given, absent = (request.options for request in models.gateway.requests)
    assert (given.max_tokens, given.stop, given.ignore_eos) == (9, ("a", "b"), True)
    sampling = given.sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.0, 0.5, 0.1)
    assert sampling.top_k == 1000
    assert dict(sampling.logit_bias) == {5: -100.0, 7: 1.5}
    assert (absent.max_tokens, absent.stop, absent.sampling.temperature, absent.sampling.seed) == (
        None,
        ("x",),
        0.7,
        None,
    )
    assert [shape.user_seed for shape in models.gateway.shapes] == [True, False]


async def test_messages_reach_the_template_as_it_knows_them(client, models):
    """Text parts are joined, a developer is the system, tool turns keep their parts, and arguments are parsed."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    reply = await client.post(URL, json={"messages": messages, "chat_template_kwargs": {"enable_thinking": False}})

    assert reply.status_code == 200, reply.text
    rendered, kwargs = models.codec.chats[0]
    function = {"name": "f", "arguments": {"x": 1}}
    assert rendered == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    assert kwargs == {"enable_thinking": False}


async def test_matched_stop_string_is_reported(client, models, chat_body):
    """The stop string that ended a reply is told in `stop_reason`."""
    models.gateway.stop_string = "###"

    choice = (await client.post(URL, json=chat_body)).json()["choices"][0]

    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "###")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": 1.0}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [5]}, "stop[0]"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"logit_bias": {"1000": 1}}, 'logit_bias["1000"]'),
        ({"logit_bias": {"-1": 1}}, 'logit_bias["-1"]'),
        ({"logit_bias": {"07": 1}}, 'logit_bias["07"]'),
        ({"logit_bias": {"5": 101}}, 'logit_bias["5"]'),
        ({"logit_bias": {"5": True}}, 'logit_bias["5"]'),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": []}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 5}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"model": 5}, "model"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": -0.1}, "repetition_penalty"),
        ({"repetition_context_size": -1}, "repetition_context_size"),
        ({"xtc_probability": 1.1}, "xtc_probability"),
        ({"xtc_threshold": -0.1}, "xtc_threshold"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"hlg": 5}, "hlg"),
        ({"hlg": {"width": -1}}, "hlg.width"),
        ({"hlg": {"colour": 1}}, "hlg.colour"),
        ({"hlg": {"enabled": 1}}, "hlg.enabled"),
        ({"curve": [[1, 2]]}, "curve"),
        ({"curve": [[50, 1], [1, 50]]}, "curve"),
        ({"curve": "steep"}, "curve"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
async def test_wrong_field_is_a_400_that_names_it(client, models, chat_body, change, param):
    """A wrong value is refused with its JSON path before anything reaches the engine."""
    reply = await client.post(URL, json=chat_body | change)

    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(param)
    assert models.gateway.requests == []
    assert models.num_leases == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("echo", True),
        ("functions", [{}]),
        ("adapter", "mine"),
        ("stop_token_ids", [5]),
        ("bad_words", ["x"]),
        ("prompt_logprobs", 1),
        ("repeat_penalty", 1.1),
        ("modalities", ["text", "audio"]),
    ],
)
async def test_unserved_field_that_changes_the_answer_is_refused(client, chat_body, name, value):
    """What would change the answer and is not served is never dropped silently."""
    error = (await client.post(URL, json=chat_body | {name: value})).json()["error"]

    assert (error["code"], error["param"]) == ("unsupported_parameter", name)
    assert name in error["message"]


async def test_neutral_values_are_served_and_unknown_fields_are_listed(client, chat_body):
    """Asking for nothing is served; a field nobody knows is served and named in a header, safely quoted."""
    neutral = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "n": 1,
        "logprobs": False,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "modalities": ["text"],
        "reasoning_effort": None,
        "user": "ann",
        "metadata": {"a": "b"},
    }
    plain = await client.post(URL, json=chat_body | neutral)
    odd = await client.post(URL, json=chat_body | {"colour": 1, "x\r\ny: ü": 2, "gone": None, "": 3})

    assert plain.status_code == 200, plain.text
    assert "x-headrace-ignored" not in plain.headers
    assert odd.status_code == 200, odd.text
    assert odd.headers["x-headrace-ignored"] == 'colour, x%0D%0Ay%3A%20%C3%BC, ""'


async def test_templates_run_off_the_event_loop(client, models, chat_body):
    """A template is a program of the model's: while one takes its time, the server answers others."""
    entered, release = threading.Event(), threading.Event()

    class SlowCodec(type(models.codec)):
        def prepare_chat(self, messages, **options):
            entered.set()
            assert release.wait(30)
            return super().prepare_chat(messages, **options)

    models.codec = SlowCodec()
    async with asyncio.TaskGroup() as group:
        chat = group.create_task(client.post(URL, json=chat_body))
        assert await asyncio.to_thread(entered.wait, 30)
        assert (await client.get("/health")).status_code == 200
        release.set()
    assert chat.result().status_code == 200
    assert threading.current_thread() not in models.codec.threads


async def test_long_texts_are_encoded_off_the_event_loop(client, models):
    """A short text to complete is encoded at once, a long one by a worker thread."""
    await client.post("/v1/completions", json={"prompt": "x"})
    await client.post("/v1/completions", json={"prompt": "x" * 5_000})
    short, long = models.codec.threads
    assert short is threading.current_thread()
    assert long is not threading.current_thread()


async def test_hopelessly_long_prompt_is_not_encoded(client, models, chat_body):
    """A text that no vocabulary fits into the context is refused before it costs the time and memory of encoding."""
    chat_body["messages"][0]["content"] = "x" * (512 * 256 + 1)
    reply = await client.post(URL, json=chat_body)

    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert not models.codec.threads


async def test_template_refusal_is_a_400(client, models, chat_body):
    """A chat that the template refuses is the client's to change."""
    models.codec.refusal = ValueError("roles must alternate")
    error = (await client.post(URL, json=chat_body)).json()["error"]
    models.codec.has_chat_template = False
    without = (await client.post(URL, json=chat_body)).json()["error"]

    assert (error["param"], error["code"]) == ("messages", "invalid_prompt")
    assert "roles must alternate" in error["message"]
    assert without["code"] == "no_chat_template"


async def test_unknown_model_is_a_404(client, chat_body):
    """`model` selects a served model; `default_model` is the default, and any other name is not found."""
    default = await client.post(URL, json=chat_body | {"model": "default_model"})
    unknown = await client.post(URL, json=chat_body | {"model": "gpt-4"})

    assert default.json()["model"] == "org/tiny"
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"


async def test_model_that_does_not_chat_says_what_it_serves(client, models, chat_body):
    """A route the model does not serve is a 400 that names what it does."""
    models.capabilities = frozenset({"completions"})

    error = (await client.post(URL, json=chat_body)).json()["error"]

    assert (error["param"], error["code"]) == ("model", "unsupported_model")
    assert "completions" in error["message"]


async def test_content_type_does_not_matter(client):
    """A body is JSON by its bytes, whatever the header calls it."""
    content = b'{"messages": [{"role": "user", "content": "hi"}]}'
    reply = await client.post(URL, content=content, headers={"content-type": "text/plain"})

    assert reply.status_code == 200
