"""The end of a text: what might have become a marker or a stop string is delivered, and no part of a stop string is."""

import itertools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace_http_api.parsing.parts import parse_all
from headrace_http_api.parsing.selection import select_parser
from headrace_scheduling import TextDelta, TextStream
from headrace_scheduling.testing import FakeDecoder

URL = "/v1/chat/completions"
TEMPLATE = "<tool_call> <think>"
TOOL = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
PIECES = ["<tool_call>", "<tool_", "<think>", "</think>", "</th", "STOP", "ST", "O", "a ", "{", "é", "\n", CALL]
STOPS = ["STOP", "Oa", "<tool_call>\n{", "</think>"]


def cut_at_stop(text, stops):
    """The obvious reference: the leftmost match, the shortest of those that start there."""
    matches = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not matches:
        return text, None
    index, _, stop = min(matches)
    return text[:index], stop


def deltas_of(text, stops, cuts):
    """What the engine tells of a reply whose tokens are the bytes between the cuts; and the stop that it matched."""
    stream, data = TextStream(FakeDecoder(), tuple(stops)), text.encode()
    deltas = []
    for begin, end in itertools.pairwise([0, *sorted(cuts), len(data)]):
        deltas.append(stream.push(tuple(data[begin:end])))
        if stream.matched_stop is not None:
            return deltas, stream.matched_stop
    return [*deltas, stream.flush()], stream.matched_stop


def read_stream(text):
    events = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    choices = [json.loads(event)["choices"][0] for event in events if event != "[DONE]"]
    deltas = [choice["delta"] for choice in choices]
    calls = [part["function"] for delta in deltas for part in delta.get("tool_calls", [])]
    return (
        "".join(delta.get("content") or "" for delta in deltas),
        "".join(delta.get("reasoning_content") or "" for delta in deltas),
        ("".join(call.get("name", "") for call in calls), "".join(call["arguments"] for call in calls)),
        [(choice["finish_reason"], choice["stop_reason"]) for choice in choices if choice["finish_reason"]],
    )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=7).map("".join),
    stops=st.lists(st.sampled_from(STOPS), max_size=2, unique=True),
    data=st.data(),
)
async def test_ends_do_not_depend_on_how_tokens_fall(client, models, chat_body, text, stops, data):
    """Law: a stream tells the text up to the leftmost stop string, split as the whole text is, and names the match."""
    cuts = data.draw(st.lists(st.integers(0, len(text.encode())), max_size=6))
    deltas, matched = deltas_of(text, stops, cuts)
    expected, stop = cut_at_stop(text, stops)
    parsed = parse_all(select_parser(TEMPLATE, tools=[TOOL]), expected)
    models.codec.template = TEMPLATE
    models.gateway.script, models.gateway.reason, models.gateway.stop_string = deltas, "stop", matched
    body = chat_body | {"tools": [TOOL], "stop": stops}

    content, reasoning, calls, ends = read_stream((await client.post(URL, json=body | {"stream": True})).text)
    whole = (await client.post(URL, json=body)).json()["choices"][0]

    assert (content, reasoning) == (parsed.content, parsed.reasoning)
    names = "".join(call.name for call in parsed.tool_calls)
    assert calls == (names, "".join(call.arguments for call in parsed.tool_calls))
    assert ends == [("tool_calls" if parsed.tool_calls else "stop", stop)]
    assert (whole["message"]["content"] or "", whole["finish_reason"], whole["stop_reason"]) == (content, *ends[0])


@pytest.mark.parametrize("tail", ["<tool_cal", "<think", "x<tool_callSTO", "\n<"])
async def test_what_only_looks_like_a_marker_is_delivered(client, models, chat_body, tail):
    """A reply that ends in the beginning of a marker or of a stop string ends in just that, streamed and whole."""
    text = f"Hi {tail}"
    models.codec.template = TEMPLATE
    models.gateway.script, _ = deltas_of(text, ["STOP"], range(1, len(text)))
    body = chat_body | {"tools": [TOOL], "stop": "STOP"}

    streamed = read_stream((await client.post(URL, json=body | {"stream": True})).text)
    whole = (await client.post(URL, json=body)).json()["choices"][0]

    assert streamed == (text, "", ("", ""), [("stop", None)])
    assert whole["message"]["content"] == text


async def test_completions_deliver_it_too(client, models):
    """Text completions, which know no markers, keep every character up to the stop string."""
    for text, expected, stop in (("a<tool_call>STO", "a<tool_call>STO", None), ("aSTOPb", "a", "STOP")):
        models.gateway.script, models.gateway.stop_string = deltas_of(text, ["STOP"], range(1, len(text)))
        reply = (await client.post("/v1/completions", json={"prompt": "x", "stop": "STOP", "stream": True})).text
        choices = [json.loads(part[6:])["choices"][0] for part in reply.split("\n\n") if part.startswith("data: {")]
        assert "".join(choice["text"] for choice in choices) == expected
        assert choices[-1]["stop_reason"] == stop


def test_a_stop_string_never_shows_in_part():
    """Every prefix of a stop string is held back until it is decided, whatever the cut."""
    for size in range(1, 6):
        deltas, stop = deltas_of("say STOP", ["STOP"], range(size, 8, size))
        assert "".join(delta.text for delta in deltas) == "say "
        assert not any("S" in delta.text for delta in deltas)
        assert (stop, deltas[-1]) == ("STOP", TextDelta("", deltas[-1].token_ids))
