"""Structured output and tool arguments of the starter model validate, through HTTP, eight at a time, beside others."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from jsonschema import Draft202012Validator

SCHEMAS = json.loads((Path(__file__).parents[1] / "sampling" / "grammar_schemas.json").read_text("utf-8"))["supported"]
NUM_SCHEMAS, AT_ONCE, MAX_TRIES, MAX_TOKENS = 40, 8, 4, 160
# Values of these may go on as long as a small model likes.
ENDLESS = (
    "any",
    "open",
    "additional",
    "recursion",
    "tree",
    "list",
    "hostname",
    "email",
    "uri",
    "anchors",
    "lower bound",
)
URL = "/chat/completions"

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1700)]


def bounded(schema):
    """The schema with an end to strings that have none."""
    if isinstance(schema, list):
        return [bounded(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: value if name in ("enum", "const") else bounded(value) for name, value in schema.items()}
    if schema.get("type") == "string" and not {"enum", "const", "pattern", "format", "maxLength"} & set(schema):
        inner["maxLength"] = max(16, schema.get("minLength", 0))
    return inner


CASES = [
    {"name": one["name"], "schema": bounded(one["schema"])}
    for one in SCHEMAS
    if isinstance(one["schema"], dict) and not any(word in one["name"] for word in ENDLESS)
]


class Traffic(threading.Thread):
    """Others: chats that stream, that are left early, and that are wrong."""

    def __init__(self, base_url):
        super().__init__(daemon=True)
        self.base_url, self.num_done, self.faults, self.stops = base_url, 0, [], threading.Event()

    def run(self):
        body = {"messages": [{"role": "user", "content": "Tell me a tale."}], "max_tokens": 24, "stream": True}
        with httpx.Client(base_url=self.base_url, timeout=120) as client:
            while not self.stops.is_set():
                with client.stream("POST", URL, json=body) as reply:
                    if self.num_done % 3:
                        lines = list(reply.iter_lines())
                        if lines[-2:-1] != ["data: [DONE]"] and "data: [DONE]" not in lines:
                            self.faults.append(lines[-3:])
                    else:
                        next(reply.iter_lines())
                wrong = client.post(URL, json=body | {"temperature": -1})
                if wrong.status_code != 400:
                    self.faults.append(wrong.text)
                self.num_done += 1


def ask(client, fields):
    """Ask until the reply ends by itself; what is cut by the limit cannot be whole."""
    for seed in range(MAX_TRIES):
        body = {
            "messages": [{"role": "user", "content": "Give an example."}],
            "temperature": 1,
            "seed": seed,
            "max_tokens": MAX_TOKENS,
        }
        reply = client.post(URL, json=body | fields)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        if choice["finish_reason"] != "length":
            return choice, seed
    return None, MAX_TRIES


def formatted(client, case):
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": case["schema"]}}}
    choice, num_cut = ask(client, fields)
    return choice and choice["message"]["content"], num_cut


def called(client, case):
    """The schema as the arguments of a call that is required, or as the one argument if it is no object's."""
    is_whole = case["schema"].get("type") == "object"
    parameters = {"type": "object", "properties": {"value": case["schema"]}, "required": ["value"]}
    tool = {"name": "give", "parameters": case["schema"] if is_whole else parameters | {"additionalProperties": False}}
    fields = {
        "tools": [{"type": "function", "function": tool}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    choice, num_cut = ask(client, fields)
    if choice is None:
        return None, num_cut
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "give"
    text = call["function"]["arguments"]
    return text if is_whole else json.dumps(json.loads(text)["value"]), num_cut


@pytest.mark.parametrize("way", [formatted, called])
def test_replies_validate(server, way):
    """Of 40 schemas each reply that ends is valid, at temperature 1, and few do not end; the others are undisturbed."""
    # A reference means another place once the schema is inside another one.
    fits = [one for one in CASES if way is formatted or one["schema"].get("type") == "object" or "$ref" not in str(one)]
    cases = fits[:NUM_SCHEMAS]
    traffic = Traffic(server.base_url)
    traffic.start()
    with httpx.Client(base_url=server.base_url, timeout=600) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(lambda case: way(client, case), cases))
    traffic.stops.set()
    traffic.join(60)

    endless = [case["name"] for case, (text, _) in zip(cases, results, strict=True) if text is None]
    num_cut = sum(tries for _, tries in results)
    print(
        f"\n{way.__name__}: {len(cases)} schemas, {num_cut} replies cut, none whole: {endless}, "
        f"{traffic.num_done} other requests"
    )
    for case, (text, _) in zip(cases, results, strict=True):
        if text is not None:
            errors = [error.message for error in Draft202012Validator(case["schema"]).iter_errors(json.loads(text))]
            assert errors == [], (case["name"], text)
    assert len(cases) == NUM_SCHEMAS
    assert endless == []
    assert traffic.faults == []
    assert traffic.num_done > 3
