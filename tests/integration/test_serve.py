"""The server as clients see it: openai-python over a real socket, on the starter model."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from openai import OpenAI

QUESTION = [{"role": "user", "content": "Name three rivers."}]
MARKER = "Zanzibarquartz"


@pytest.fixture(scope="module")
def client(server):
    with OpenAI(base_url=server.base_url, api_key="unused", max_retries=0, timeout=60) as made:
        yield made


def ask(client, *, messages=QUESTION, max_tokens=12, **options):
    answer = client.chat.completions.create(model="default_model", messages=messages, max_tokens=max_tokens, **options)
    return answer.choices[0].message.content


def read(stream):
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_health_readiness_and_models_are_truthful(server, client):
    """A ready server says so, and lists the one model under its name."""
    assert server.get("/health").json()["status"] == "ok"
    assert server.get("/ready").status_code == 200
    assert [model.id for model in client.models.list()] == ["smollm2-135m"]
    assert client.models.retrieve("smollm2-135m").id == "smollm2-135m"


def test_chat_and_its_usage(client):
    """A chat answers with text, a reason and the counts of its tokens."""
    answer = client.chat.completions.create(model="smollm2-135m", messages=QUESTION, max_tokens=12, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_stream_adds_up_to_the_plain_answer(client):
    """Greedy text is the same streamed or not; one chunk ends it, and usage comes only when asked for."""
    plain = ask(client, temperature=0)
    options = {"model": "default_model", "messages": QUESTION, "max_tokens": 12, "temperature": 0, "stream": True}
    chunks = list(client.chat.completions.create(**options, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert text == plain
    assert ends == ["length"]
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [12]
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in client.chat.completions.create(**options | {"max_tokens": 2}))


def test_completions_and_stop_strings(client):
    """Raw prompts complete, and a stop string is never part of the text."""
    whole = client.completions.create(model="default_model", prompt="One, two, three,", max_tokens=10, temperature=0)
    text = whole.choices[0].text
    assert len(text) > 4
    stop = text[3:5]
    cut = client.completions.create(
        model="default_model", prompt="One, two, three,", max_tokens=10, temperature=0, stop=stop
    )
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == text[: text.index(stop)]


def test_errors_are_typed(client):
    """openai-python raises the class that fits, with the field at fault."""
    with pytest.raises(openai.BadRequestError) as bad:
        ask(client, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert "no-such-model" in str(missing.value)
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(model="default_model", messages=QUESTION, extra_body={"adapter": "x"})
    assert unsupported.value.param == "adapter"


def test_a_seeded_request_is_the_same_alone_and_among_seven_others(client):
    """Equal seeds give equal texts in any company; different or absent seeds differ."""

    def seeded(seed):
        return ask(client, temperature=1.5, max_tokens=10, **({} if seed is None else {"seed": seed}))

    alone = seeded(7)
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(seeded, [7, 8, 9, 10, None, None, None, None]))
    assert together[0] == alone
    assert len(set(together)) == len(together)


LONG_PROMPT = "river " * 9_000

BAD_BODIES = {
    "malformed JSON": b'{"messages": [',
    "invalid UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "empty messages": b'{"messages": []}',
    "unknown role": b'{"messages": [{"role": "wizard", "content": "x"}]}',
    "temperature in words": {"temperature": "hot"},
    "NaN": b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "a number as stop string": {"stop": [5]},
    "no tokens": {"max_tokens": 0},
    "longer than the context": {"messages": [{"role": "user", "content": LONG_PROMPT}]},
    "bias outside the vocabulary": {"logit_bias": {"99999999": 1}},
    "50 MB": b'{"messages": "' + b"x" * 50_000_000 + b'"}',
    "nested 10,000 deep": b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
}
FIELDS = {
    "empty messages": "messages",
    "unknown role": "messages[0].role",
    "temperature in words": "temperature",
    "a number as stop string": "stop[0]",
    "no tokens": "max_tokens",
    "bias outside the vocabulary": "logit_bias",
}


def post_bad(http, name):
    body = BAD_BODIES[name]
    if isinstance(body, dict):
        body = json.dumps({"messages": QUESTION} | body).encode()
    try:
        return http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    except (httpx.WriteError, httpx.ReadError):
        return None


def test_bad_input_is_refused_with_its_field_and_disturbs_nobody(server, client):
    """Each bad body is a 4xx that names the field, and a neighbour's stream is what it is alone."""
    options = {"model": "default_model", "messages": QUESTION, "max_tokens": 48, "temperature": 0, "stream": True}
    alone = read(client.chat.completions.create(**options))
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.url, timeout=60) as http:
        stream = client.chat.completions.create(**options)
        first = next(stream)
        neighbour = pool.submit(read, stream)
        answers = {name: post_bad(http, name) for name in BAD_BODIES}
        assert (first.choices[0].delta.content or "") + neighbour.result() == alone
    for name, answer in answers.items():
        if answer is None:
            # The server may close the connection of a body that it will not read to the end.
            assert name == "50 MB"
            continue
        assert answer.status_code == (413 if name == "50 MB" else 400), (name, answer.text)
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        if name in FIELDS:
            assert (error["param"] or "").startswith(FIELDS[name]), (name, error)
    assert answers["longer than the context"].json()["error"]["code"] == "context_length_exceeded"


def test_top_k_above_the_vocabulary_filters_nothing(server):
    """A filter that keeps everything is accepted."""
    body = {"messages": QUESTION, "max_tokens": 2, "top_k": 1_000_000, "seed": 1}
    answer = httpx.post(f"{server.base_url}/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("stream", "is_half"), [(True, False), (False, True)], ids=["stream-closed", "whole-half-closed"]
)
def test_a_client_that_leaves_takes_its_row_with_it(server, stream, is_half):
    """Once its connection is closed, or its sending side is, nothing more is generated for a client."""

    def counts():
        (model,) = server.get("/stats").json()["models"].values()
        return model["requests"]["cancelled"], model["batch"]["running"], model["tokens"]["generated"]

    cancelled, _, generated = counts()
    body = json.dumps({"messages": QUESTION, "max_tokens": 4000, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
    place = httpx.URL(server.url)
    with socket.create_connection((place.host, place.port), timeout=30) as connection:
        connection.sendall(head.encode() + body)
        until(lambda: counts()[2] > generated + 2)
        if is_half:
            connection.shutdown(socket.SHUT_WR)
            until(lambda: counts()[0] == cancelled + 1)
    until(lambda: counts()[0] == cancelled + 1)
    _, running, generated = counts()
    time.sleep(0.1)
    assert running == 0
    assert counts()[2] == generated
    assert "ERROR" not in server.read_errors()


def test_no_prompt_or_output_reaches_a_log(server, client):
    """D17: what clients send and get is in no log line."""
    text = ask(client, messages=[{"role": "user", "content": f"Repeat: {MARKER}"}], max_tokens=8, temperature=0)
    with pytest.raises(openai.BadRequestError):
        ask(client, messages=[{"role": "user", "content": MARKER}], stop=[5])
    log = server.read_errors()
    assert MARKER not in log
    assert text not in log


def test_statistics_count_what_was_served(server, client):
    """/stats grows by the request and by its tokens."""

    def counts():
        (model,) = server.get("/stats").json()["models"].values()
        return model["requests"]["finished"], model["tokens"]["generated"]

    finished, generated = counts()
    ask(client, max_tokens=3, temperature=0)
    assert counts() == (finished + 1, generated + 3)
