"""Any JSON anywhere in a request is an answer or a refusal, never a fault."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["user", "tool", "text", "auto", "none", "5", "default_model"])
)
KEYS = st.text(max_size=4) | st.sampled_from(["role", "content", "type", "text", "name", "function", "5", "arguments"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    "messages",
    "prompt",
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "logit_bias",
    "seed",
    "stop",
    "ignore_eos",
    "chat_template_kwargs",
    "tools",
    "response_format",
    "n",
    "logprobs",
    "unknown",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "enable_thinking",
    "thinking_budget",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "json_schema",
    "grammar",
    "best_of",
    "echo",
    "top_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "repetition_context_size",
    "xtc_probability",
    "xtc_threshold",
    "typical_p",
    "top_n_sigma",
    "min_tokens",
    "dry_multiplier",
    "dry_penalty_last_n",
    "hlg",
    "curve",
    "timeout_s",
    "priority",
    "session_id",
    "suffix",
]


def check(reply):
    if reply.status_code == 200:
        return
    assert 400 <= reply.status_code < 500, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"]


@pytest.mark.parametrize(
    ("url", "base"), [(CHAT_URL, {"messages": [{"role": "user", "content": "x"}]}), (COMPLETION_URL, {"prompt": "x"})]
)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FIELDS), value=VALUES)
async def test_any_value_of_any_field_is_a_200_or_a_4xx(client, url, base, name, value):
    """One field with any JSON value never makes the server fail, and a refusal names that field."""
    reply = await client.post(url, json=base | {name: value})

    check(reply)
    if reply.status_code == 400 and reply.json()["error"]["code"] != "invalid_prompt":
        param = reply.json()["error"]["param"]
        assert param is not None
        assert param.partition(".")[0].partition("[")[0] == name


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=st.dictionaries(KEYS | st.sampled_from(["tool_calls", "tool_call_id"]), VALUES, max_size=5))
async def test_any_message_is_a_200_or_a_4xx(client, message):
    """The same inside a message."""
    check(await client.post(CHAT_URL, json={"messages": [{"role": "assistant", "content": "x"} | message]}))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=VALUES, cut=st.integers(0, 40), junk=st.binary(max_size=3))
async def test_damaged_bodies_are_refused(client, value, cut, junk):
    """Bytes cut out of, and put into, a valid body never make the server fail."""
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stop": value}).encode()

    check(await client.post(CHAT_URL, content=body[:cut] + junk + body[cut + 1 :]))
