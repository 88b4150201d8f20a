"""Fields that constrain the reply: what grammar they become, where it is checked, and what is refused."""

import pytest

from headrace_sampling import GrammarSpec, GrammarTag

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
BASES = {CHAT_URL: {"messages": [{"role": "user", "content": "x"}]}, COMPLETION_URL: {"prompt": "x"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
LARK = 'start: "a" | "b"'
GBNF = 'root ::= "a" | "b"'
TAG = {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}
TAGGED = GrammarSpec.structural_tag(
    [GrammarTag(begin="<f>", content=GrammarSpec.json_schema(SCHEMA), end="</f>")], triggers=["<f"]
)


def formatted(**schema):
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


@pytest.mark.parametrize("url", BASES)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, GrammarSpec.json_object()),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, GrammarSpec.json_schema(SCHEMA)),
        (formatted(name="n", schema=SCHEMA, strict=True), GrammarSpec.json_schema(SCHEMA)),
        (formatted(name="n", schema=SCHEMA, strict=False), GrammarSpec.json_schema(SCHEMA)),
        (formatted(name="n"), GrammarSpec.json_object()),
        ({"response_format": {"type": "structural_tag", "structures": [TAG], "triggers": ["<f"]}}, TAGGED),
        ({"guided_json": SCHEMA}, GrammarSpec.json_schema(SCHEMA)),
        ({"guided_json": '{"type": "object"}'}, GrammarSpec.json_schema({"type": "object"})),
        ({"guided_regex": "[ab]+"}, GrammarSpec.regex("[ab]+")),
        ({"guided_choice": ["yes", "no"]}, GrammarSpec.choice(["yes", "no"])),
        ({"guided_grammar": LARK}, GrammarSpec.lark(LARK)),
        ({"guided_grammar": GBNF}, GrammarSpec.ebnf(GBNF)),
        ({"grammar": GBNF}, GrammarSpec.ebnf(GBNF)),
        ({"grammar": ""}, None),
        ({"json_schema": SCHEMA}, GrammarSpec.json_schema(SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarSpec.json_schema(SCHEMA)),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "json_object": False}},
            GrammarSpec.json_schema(SCHEMA, compact=True),
        ),
        ({"structured_outputs": {"json_object": True, "regex": None}}, GrammarSpec.json_object()),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSpec.regex("a+")),
        ({"structured_outputs": {"choice": ["a"]}}, GrammarSpec.choice(["a"])),
        ({"structured_outputs": {"grammar": LARK}}, GrammarSpec.lark(LARK)),
        ({"structured_outputs": {"structural_tag": {"structures": [TAG], "triggers": ["<f"]}}}, TAGGED),
        ({"structured_outputs": {}}, None),
        ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, GrammarSpec.json_schema(SCHEMA)),
    ],
)
async def test_each_form_becomes_its_grammar(client, models, url, fields, expected):
    """OpenAI's, vLLM's and llama.cpp's forms are enforced by the engine as one specification."""
    reply = await client.post(url, json=BASES[url] | fields)

    assert reply.status_code == 200, reply.text
    assert "x-headrace-ignored" not in reply.headers
    assert models.gateway.requests[0].grammar == expected
    assert models.gateway.shapes[0].has_grammar == (expected is not None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": 5}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (formatted(schema=5), "response_format.json_schema.schema"),
        (formatted(schema=SCHEMA, strict="yes"), "response_format.json_schema.strict"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.structures"),
        ({"response_format": {"type": "structural_tag", "structures": [{}]}}, "response_format.structures[0].begin"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 5]}, "guided_choice[1]"),
        ({"guided_grammar": {}}, "guided_grammar"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"colour": 1}}, "structured_outputs.colour"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ],
)
async def test_wrong_forms_are_refused_by_their_path(client, models, fields, param):
    """A wrong form, two forms at once, and options that nobody enforces are a 400 before anything runs."""
    reply = await client.post(CHAT_URL, json=BASES[CHAT_URL] | fields)

    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert models.num_leases == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_grammar": 'start: "a'}, "guided_grammar"),
        ({"grammar": "root ::= nothing"}, "grammar"),
        (formatted(schema={"type": "object", "unevaluatedProperties": False}), "response_format"),
        ({"guided_json": False}, "guided_json"),
    ],
)
async def test_what_cannot_be_compiled_is_refused_with_the_reason(client, models, fields, param):
    """The compiler's reason reaches the client as a 400 that names the field; nothing is submitted."""
    reply = await client.post(COMPLETION_URL, json=BASES[COMPLETION_URL] | fields)

    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_grammar", param)
    assert models.gateway.requests == []


async def test_grammars_wait_for_the_end_of_reasoning(client, models):
    """Where the prompt has opened reasoning, the grammar begins behind its end; elsewhere at once."""
    body = BASES[CHAT_URL] | {"response_format": {"type": "json_object"}}
    await client.post(CHAT_URL, json=body)
    models.codec.starts_in_reasoning = True
    await client.post(CHAT_URL, json=body)
    models.codec.template = "[THINK] [/THINK]"
    await client.post(CHAT_URL, json=body)

    assert [one.grammar.free_until for one in models.gateway.requests] == [None, "</think>", "[/THINK]"]


@pytest.mark.parametrize("name", ["thinking_budget", "thinking_token_budget"])
async def test_a_thinking_budget_limits_the_reasoning(client, models, name):
    """With and without a grammar behind it the reasoning has at most so many tokens."""
    models.codec.starts_in_reasoning = True
    body = BASES[CHAT_URL] | {name: 7}
    assert (await client.post(CHAT_URL, json=body)).status_code == 200
    assert (await client.post(CHAT_URL, json=body | {"guided_regex": "a"})).status_code == 200

    free, bound = (one.grammar for one in models.gateway.requests)
    assert free == GrammarSpec.any_text(free_until="</think>", free_limit=7)
    assert bound == GrammarSpec.regex("a", free_until="</think>").limited(7)


async def test_a_budget_that_cannot_be_kept_is_refused(client, models):
    """A model that decides itself whether it thinks is not limited silently; one that does not think needs no limit."""
    body = BASES[CHAT_URL] | {"thinking_budget": 7}
    without = await client.post(CHAT_URL, json=body)
    models.codec.template = "<think></think>"
    free = await client.post(CHAT_URL, json=body)
    switched_off = await client.post(CHAT_URL, json=body | {"enable_thinking": False})

    assert (without.status_code, free.status_code, switched_off.status_code) == (200, 400, 200)
    assert free.json()["error"]["param"] == "thinking_budget"
    assert [one.grammar for one in models.gateway.requests] == [None, None]
