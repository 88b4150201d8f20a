"""The official client over a real socket."""

import openai
import pytest

from headrace_scheduling.errors import EngineUnavailable, QueueFull


@pytest.fixture
async def openai_client(base_url):
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


MESSAGES = [{"role": "user", "content": "hi"}]


async def test_chat_and_usage(openai_client):
    """The client reads text, reason and usage of a whole answer."""
    answer = await openai_client.chat.completions.create(model="default_model", messages=MESSAGES)

    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_stream(openai_client):
    """The client reads a stream to its end, and the usage chunk after it."""
    stream = await openai_client.chat.completions.create(
        model="default_model", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.total_tokens == 6


async def test_completions_and_models(openai_client):
    """Text completions and the model list are read too."""
    answer = await openai_client.completions.create(model="org/tiny", prompt="ab")
    listed = await openai_client.models.list()
    one = await openai_client.models.retrieve("org/tiny")

    assert answer.choices[0].text == "Hello"
    assert [card.id for card in listed.data] == [one.id] == ["org/tiny"]


@pytest.mark.parametrize(
    ("refusal", "error"),
    [(QueueFull("full"), openai.RateLimitError), (EngineUnavailable("x"), openai.InternalServerError)],
)
async def test_overload_is_a_typed_error(openai_client, models, refusal, error):
    """Overload and restarts are the errors that the client's own retries know."""
    models.gateway.refusal = refusal
    with pytest.raises(error):
        await openai_client.chat.completions.create(model="default_model", messages=MESSAGES)


async def test_wrong_requests_are_typed_errors(openai_client):
    """A bad value and an unknown model are the client's 400 and 404, with the field at hand."""
    with pytest.raises(openai.BadRequestError) as bad:
        await openai_client.chat.completions.create(model="default_model", messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.NotFoundError) as missing:
        await openai_client.chat.completions.create(model="gpt-4", messages=MESSAGES)

    assert bad.value.param == "temperature"
    assert missing.value.code == "model_not_found"


async def test_fault_in_a_stream_is_raised(openai_client, models):
    """A fault after the start reaches the client as an error, not as a short answer."""
    models.gateway.script = ["Hel", EngineUnavailable("the engine restarts")]
    stream = await openai_client.chat.completions.create(model="default_model", messages=MESSAGES, stream=True)

    with pytest.raises(openai.APIError):
        [chunk async for chunk in stream]
