"""openai-python against a running server: chat, streams, parsed replies, tools, completions, errors.

python openai_python.py http://127.0.0.1:8080/v1
"""

import asyncio
import json
import sys

import openai
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

MODEL = "default_model"
QUESTION = [{"role": "user", "content": "Name a river and how long it is."}]


class River(BaseModel):
    name: str = Field(max_length=24)
    length_km: int = Field(ge=0, le=9999)


class Lookup(BaseModel):
    """Look a river up."""

    name: str = Field(max_length=24)


def chat(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=16, temperature=0, logprobs=True, top_logprobs=2, n=2, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.message.content for choice in answer.choices)
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    return "chat with n, logprobs and seed"


def stream(client):
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=16, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=16, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    return "stream with usage"


def stream_helper(client):
    with client.chat.completions.stream(
        model=MODEL, messages=QUESTION, max_tokens=60, temperature=1, seed=3, response_format=River
    ) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, River)
    assert {"content.delta", "content.done", "chunk"} <= kinds
    return "chat.completions.stream with a parsed reply"


def parse(client):
    answer = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, max_tokens=60, temperature=1, seed=2, response_format=River
    )
    assert isinstance(answer.choices[0].message.parsed, River)
    return "chat.completions.parse with a pydantic model"


def tools(client):
    tool = pydantic_function_tool(Lookup)
    answer = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, max_tokens=80, temperature=1, seed=1, tools=[tool], tool_choice="required"
    )
    call = answer.choices[0].message.tool_calls[0]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert isinstance(call.function.parsed_arguments, Lookup)
    turn = [
        *QUESTION,
        answer.choices[0].message.model_dump(exclude_none=True, exclude={"parsed"}),
        {"role": "tool", "tool_call_id": call.id, "content": "no such river"},
    ]
    turn[1]["tool_calls"] = [
        {"id": call.id, "type": "function", "function": {"name": "Lookup", "arguments": call.function.arguments}}
    ]
    after = client.chat.completions.create(model=MODEL, messages=turn, max_tokens=8, tools=[tool], tool_choice="none")
    assert after.choices[0].message.content is not None
    return "tools: a required call, parsed, and the turn after its result"


def tool_stream(client):
    tool = pydantic_function_tool(Lookup)
    with client.chat.completions.stream(
        model=MODEL, messages=QUESTION, max_tokens=80, temperature=1, seed=1, tools=[tool],
        tool_choice={"type": "function", "function": {"name": "Lookup"}},
    ) as events:  # fmt: skip
        kinds = [event.type for event in events]
        final = events.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, Lookup)
    return "tools in a stream: a named call, argument deltas"


def completions(client):
    scored = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=0, echo=True, logprobs=1)
    both = client.completions.create(model=MODEL, prompt=["One, two,", "A, b,"], max_tokens=6, stop=["\n"])
    assert scored.choices[0].text == "One, two,"
    assert scored.choices[0].logprobs.token_logprobs[0] is None
    assert [choice.index for choice in both.choices] == [0, 1]
    return "completions: echo with logprobs, a list of prompts, stop"


def errors(client):
    for fields, kind, param in (
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
    ):
        refusal = None
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": QUESTION} | fields)
        except kind as error:
            refusal = error
        assert refusal is not None, f"{fields} was served"
        assert refusal.param == param
    return "errors: 400 and 404 as their classes, with the field"


def models(client):
    (card,) = client.models.list().data
    assert client.models.retrieve(card.id).id == card.id
    return "models"


async def concurrent(base_url):
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=12, seed=seed % 2)
                for seed in range(8)
            )
        )
    texts = [answer.choices[0].message.content for answer in answers]
    assert len(set(texts)) <= 2
    return "AsyncOpenAI: eight at once, equal seeds give equal replies"


def main(base_url):
    client = OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)
    steps = (models, chat, stream, parse, stream_helper, tools, tool_stream, completions, errors)
    exercised = [step(client) for step in steps] + [asyncio.run(concurrent(base_url))]
    print(json.dumps({"client": "openai (Python)", "version": openai.__version__, "exercised": exercised}))


if __name__ == "__main__":
    main(sys.argv[1])
