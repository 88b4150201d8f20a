"""What a request tells the engine about stored prefixes, and what the codec learns from a reply."""

import pytest

URL = "/v1/chat/completions"


async def test_a_reply_is_remembered_with_its_prompt(client, models, chat_body):
    """After a chat, whole or streamed, the codec knows the ids of prompt and reply; completions have no next turn."""
    models.gateway.script = ["Hel", "", "lo"]
    await client.post(URL, json=chat_body)
    models.gateway.script = ["Hel", "", "lo"]
    await client.post(URL, json=chat_body | {"stream": True})
    models.gateway.script = ["Hel", "", "lo"]
    await client.post("/v1/completions", json={"prompt": "x"})
    (whole, streamed) = models.codec.remembered
    assert whole == streamed
    assert whole[-2:] == [7, 7]
    assert len(whole) == len(models.gateway.requests[0].prompt_ids) + 3


async def test_a_codec_that_cannot_remember_costs_nothing(client, models, chat_body):
    """Remembering is for the next turn; when it fails, this one is whole."""

    def fail(token_ids):
        raise OSError("no room")

    models.codec.__class__.remember, original = lambda self, ids: fail(ids), models.codec.__class__.remember
    try:
        reply = await client.post(URL, json=chat_body)
    finally:
        models.codec.__class__.remember = original
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"]["content"] == "Hello"


@pytest.mark.parametrize(
    ("fields", "session_id"),
    [({}, None), ({"prompt_cache_key": "k"}, "k"), ({"session_id": "s", "prompt_cache_key": "k"}, "s")],
)
async def test_sessions_and_priorities_reach_the_engine(client, models, chat_body, fields, session_id):
    """`session_id` wins over `prompt_cache_key`; priority is interactive unless said."""
    await client.post(URL, json=chat_body | fields)
    await client.post(URL, json=chat_body | {"priority": "batch"})
    first, second = models.gateway.requests[-2:]
    assert first.session_id == session_id
    assert (first.priority, second.priority) == ("interactive", "batch")


async def test_a_wrong_priority_is_refused(client, chat_body):
    """A priority that does not exist is a 400 that names the two."""
    reply = await client.post(URL, json=chat_body | {"priority": 3})
    assert reply.status_code == 400
    assert "interactive" in reply.json()["error"]["message"]


async def test_tenants_are_keys_and_salts(make_client, models, chat_body):
    """Requests share prefixes only with the same API key and the same salt; neither is told to the engine."""
    tenants = []
    async with make_client(api_keys=("one", "two")) as client:
        for key, salt in (("one", None), ("two", None), ("one", "s"), ("one", None)):
            body = chat_body if salt is None else chat_body | {"cache_salt": salt}
            reply = await client.post(URL, json=body, headers={"authorization": f"Bearer {key}"})
            assert reply.status_code == 200, reply.text
            tenants.append(models.gateway.requests[-1].tenant)
    assert tenants[0] == tenants[3]
    assert len(set(tenants)) == 3
    assert not any("one" in tenant or "two" in tenant for tenant in tenants)
