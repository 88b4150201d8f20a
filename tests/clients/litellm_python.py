"""litellm against a running server, with its own cost map instead of one from elsewhere.

python litellm_python.py http://127.0.0.1:8080/v1
"""

import asyncio
import json
import os
import sys
from importlib.metadata import version

# Before the import, which reads it: nothing is fetched.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LITELLM_TELEMETRY"] = "False"

import litellm
from pydantic import BaseModel, Field

QUESTION = [{"role": "user", "content": "Name a river."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a river up",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 24}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
}


class River(BaseModel):
    name: str = Field(max_length=24)


def main(base_url):
    common = {"api_base": base_url, "api_key": "none", "messages": QUESTION, "max_tokens": 60}
    hosted = {"model": "hosted_vllm/default_model", **common}
    plain = {"model": "openai/default_model", **common}
    exercised = []

    answer = litellm.completion(**plain, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage.total_tokens > answer.usage.prompt_tokens
    exercised.append("completion (openai/)")

    chunks = list(litellm.completion(**plain, temperature=0, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert litellm.stream_chunk_builder(chunks, messages=QUESTION).usage.completion_tokens > 0
    exercised.append("completion in a stream, rebuilt by stream_chunk_builder")

    parsed = litellm.completion(**plain, temperature=1, seed=1, response_format=River)
    River.model_validate_json(parsed.choices[0].message.content)
    exercised.append("response_format with a pydantic model")

    called = litellm.completion(**hosted, temperature=1, seed=1, tools=[TOOL], tool_choice="required")
    (call, *_) = called.choices[0].message.tool_calls
    # litellm takes additionalProperties out of what it sends here, so that more names may come.
    assert "name" in json.loads(call.function.arguments)
    exercised.append("tools, required (hosted_vllm/)")

    guided = litellm.completion(**hosted, temperature=1, extra_body={"guided_choice": ["Rhine", "Nile"]})
    assert guided.choices[0].message.content in {"Rhine", "Nile"}
    exercised.append("guided_choice as an extra field (hosted_vllm/)")

    text_answer = litellm.text_completion(
        model="text-completion-openai/default_model", prompt="One, two,", api_base=base_url, api_key="none",
        max_tokens=6, temperature=0,
    )  # fmt: skip
    assert text_answer.choices[0].text
    exercised.append("text_completion")

    async def several():
        return await asyncio.gather(*(litellm.acompletion(**plain | {"max_tokens": 8}) for _ in range(4)))

    assert all(one.choices[0].message.content is not None for one in asyncio.run(several()))
    exercised.append("acompletion, four at once")

    try:
        litellm.completion(**plain | {"model": "openai/gpt-4"})
    except litellm.NotFoundError:
        exercised.append("an unknown model is its NotFoundError")
    else:
        raise AssertionError("an unknown model was served")
    try:
        litellm.completion(**plain | {"messages": [{"role": "user", "content": "a " * 20_000}]})
    except litellm.ContextWindowExceededError:
        exercised.append("a prompt that is too long is its ContextWindowExceededError")
    else:
        raise AssertionError("a prompt beyond the context was served")
    print(json.dumps({"client": "litellm", "version": version("litellm"), "exercised": exercised}))


if __name__ == "__main__":
    main(sys.argv[1])
