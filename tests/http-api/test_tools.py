"""Tools: what the template and the engine get, what comes back, and what is refused."""

import json

import pytest

from headrace_sampling import GrammarSpec, GrammarTag, check_grammar

URL = "/v1/chat/completions"
HERMES = "<tool_call>"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "tells it", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture
def body(chat_body):
    return chat_body | {"tools": [WEATHER, CLOCK]}


def chunks(text):
    events = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [json.loads(event) for event in events if event != "[DONE]"]


def split(text, size):
    return [text[at : at + size] for at in range(0, len(text), size)]


async def test_tools_reach_the_template(client, models, body):
    """As the client sent them; with `none` the model is told of no tool."""
    await client.post(URL, json=body)
    await client.post(URL, json=body | {"tool_choice": "none"})
    await client.post(URL, json=body | {"tools": []})

    assert models.codec.tools == [[WEATHER, CLOCK], None, None]


async def test_reasoning_fields_reach_the_template(client, models, chat_body):
    """Effort by itself, the switch among the template's variables, whose own fields win."""
    await client.post(URL, json=chat_body | {"reasoning_effort": "low"})
    await client.post(URL, json=chat_body | {"enable_thinking": False, "chat_template_kwargs": {"x": 1}})
    await client.post(
        URL, json=chat_body | {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}
    )

    assert models.codec.efforts == ["low", None, None]
    assert [kwargs for _, kwargs in models.codec.chats] == [
        None,
        {"enable_thinking": False, "x": 1},
        {"enable_thinking": True},
    ]


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({}, 1.5),
        ({"reasoning_effort": "low"}, 1.5),
        ({"reasoning_effort": "none"}, 0.7),
        ({"enable_thinking": False}, 0.7),
        ({"chat_template_kwargs": {"enable_thinking": False}, "temperature": 1.2}, 1.2),
    ],
)
async def test_without_thinking_the_default_temperature_is_lower(client, models, chat_body, fields, temperature):
    """A default above 0.7 is lowered where thinking is off; a temperature of the request's own stays."""
    models.temperature = 1.5
    await client.post(URL, json=chat_body | fields)

    assert models.gateway.requests[0].options.sampling.temperature == temperature


async def test_a_call_is_a_message_with_tool_calls(client, models, body):
    """The family's markup becomes OpenAI's tool calls, with no content."""
    models.codec.template, models.gateway.script = HERMES, [CALL]
    choice = (await client.post(URL, json=body)).json()["choices"][0]

    (call,) = choice["message"]["tool_calls"]
    assert call.pop("id")
    assert call == {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("size", [1, 3, 8, 1000])
async def test_streamed_calls_equal_whole_ones(client, models, body, size):
    """However the text is cut: one start with id and name, arguments in pieces, content apart."""
    models.codec.template = HERMES
    models.gateway.script = split("Wait. " + CALL + "\n" + CALL, size)
    got = chunks((await client.post(URL, json=body | {"stream": True})).text)

    deltas = [chunk["choices"][0]["delta"] for chunk in got]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    starts = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]["name"]) for call in starts] == [
        (0, "function", "weather"),
        (1, "function", "weather"),
    ]
    for index in range(2):
        pieces = [call["function"]["arguments"] for call in calls if call["index"] == index]
        assert json.loads("".join(pieces)) == {"city": "Rome"}
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == "Wait."
    assert got[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_cut_call_ends_by_length(client, models, body):
    """A reply at its limit may end inside a call, and says so."""
    models.codec.template, models.gateway.script, models.gateway.reason = HERMES, [CALL[:-20]], "length"
    choice = (await client.post(URL, json=body)).json()["choices"][0]

    assert choice["finish_reason"] == "length"


async def test_reasoning_is_split_off(client, models, chat_body):
    """Reasoning has fields of its own, under both names that clients know."""
    models.codec.template, models.codec.starts_in_reasoning = "<think></think>", True
    models.gateway.script = split("so it is</think>\n\nHello", 2)
    message = (await client.post(URL, json=chat_body)).json()["choices"][0]["message"]
    models.gateway.script = split("so it is</think>\n\nHello", 2)
    got = chunks((await client.post(URL, json=chat_body | {"stream": True})).text)

    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Hello", "so it is", "so it is")
    for name, text in (("content", "Hello"), ("reasoning_content", "so it is"), ("reasoning", "so it is")):
        assert "".join(chunk["choices"][0]["delta"].get(name) or "" for chunk in got) == text


@pytest.mark.parametrize("stream", [True, False])
async def test_one_call_if_calls_are_not_parallel(client, models, body, stream):
    """With `parallel_tool_calls` false at most one call is delivered."""
    models.codec.template, models.gateway.script = HERMES, [CALL + "\n" + CALL]
    reply = await client.post(URL, json=body | {"parallel_tool_calls": False, "stream": stream})

    assert reply.text.count("weather") == 1


def tags(*names):
    schemas = {"weather": PARAMETERS, "clock": {"type": "object"}}
    return [
        GrammarTag(
            begin=f'<tool_call>\n{{"name": "{name}", "arguments": ',
            content=GrammarSpec.json_schema(schemas[name]),
            end="}\n</tool_call>",
        )
        for name in names
    ]


@pytest.mark.parametrize("template", [HERMES, "", "<function= <parameter=", "<|channel|> <|message|>"])
@pytest.mark.parametrize(
    ("fields", "names", "between"),
    [
        ({"tool_choice": "required"}, ("weather", "clock"), "\n"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ("weather", "clock"), None),
        ({"tool_choice": NAMED}, ("clock",), "\n"),
    ],
)
async def test_forced_calls_are_enforced(client, models, body, template, fields, names, between):
    """Required and named calls are a grammar in the family's form, or in the common one, and are read from it."""
    models.codec.template = template
    call = CALL if "weather" in names else CALL.replace("weather", "clock")
    models.gateway.script = [call]
    reply = await client.post(URL, json=body | fields)

    grammar = models.gateway.requests[0].grammar
    assert grammar == GrammarSpec.structural_tag(
        tags(*names), triggers=["<tool_call>"], allows_text=False, between=between
    )
    check_grammar(grammar)
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == names[0]


@pytest.mark.parametrize(
    "template", ["[TOOL_CALLS] [ARGS]", "[TOOL_CALLS]", "<|tool_call|>", "<|python_tag|>", "<TOOLCALL>"]
)
async def test_forced_calls_of_other_families_compile(client, models, body, template):
    """Each family's form gives a grammar that compiles."""
    models.codec.template = template
    reply = await client.post(URL, json=body | {"tool_choice": "required"})

    assert reply.status_code == 200, reply.text
    assert not models.gateway.requests[0].grammar.allows_text


async def test_strict_tools_hold_their_arguments(client, models, body):
    """A strict tool's arguments match its schema even where the model may also just talk."""
    models.codec.template = HERMES
    strict = WEATHER | {"function": WEATHER["function"] | {"strict": True}}
    await client.post(URL, json=body | {"tools": [strict, CLOCK]})
    await client.post(URL, json=body | {"tools": [strict, CLOCK], "tool_choice": "none"})

    first, second = (one.grammar for one in models.gateway.requests)
    assert first == GrammarSpec.structural_tag(tags("weather", "clock"), triggers=["<tool_call>"])
    assert second is None


async def test_a_forced_call_waits_for_the_end_of_reasoning(client, models, body):
    """A model that thinks may do so before it must call."""
    models.codec.template, models.codec.starts_in_reasoning = HERMES + "<think></think>", True
    models.gateway.script = ["hm</think>\n", CALL]
    reply = await client.post(URL, json=body | {"tool_choice": "required", "thinking_budget": 5})

    grammar = models.gateway.requests[0].grammar
    assert (grammar.free_until, grammar.free_limit) == ("</think>", 5)
    message = reply.json()["choices"][0]["message"]
    assert message["reasoning_content"] == "hm"
    assert len(message["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters.type",
        ),
        ({"tools": [{"function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"functions": [CLOCK["function"]]}, "functions"),
        ({"function_call": {"name": "clock"}}, "function_call"),
    ],
)
async def test_wrong_tools_are_refused_by_their_path(client, models, body, fields, param):
    """A wrong tool, a choice of nothing, and contradictions are a 400 before anything runs."""
    reply = await client.post(URL, json=body | fields)

    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert models.num_leases == 0


async def test_a_schema_that_cannot_be_enforced_is_told_where_it_must_be(client, models, body):
    """A free model gets the tool as it is; a forced one cannot be held to a keyword that nobody enforces."""
    odd = {"function": {"name": "f", "parameters": {"type": "object", "unevaluatedProperties": False}}}
    models.codec.template = HERMES
    free = await client.post(URL, json=body | {"tools": [odd]})
    forced = await client.post(URL, json=body | {"tools": [odd], "tool_choice": "required"})

    assert free.status_code == 200
    assert (forced.status_code, forced.json()["error"]["code"]) == (400, "invalid_grammar")
    assert "unevaluatedProperties" in forced.json()["error"]["message"]
