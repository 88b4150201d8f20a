"""What a server that only transcribes tells of itself (W-05a)."""

import pytest

STATS = {
    "resident": True,
    "loads": 1,
    "unloads": 0,
    "requests": 0,
    "last_load_ms": 500.0,
    "idle_unload_sec": 0.0,
    "running": 0,
    "waiting": 0,
    "failed": 0,
    "cancelled": 0,
}


async def test_health_counts_open_sessions(audio_client):
    """Status, the service's counts, and how many sessions are open."""
    await audio_client.post("/v1/audio/sessions")

    response = await audio_client.get("/health")

    assert response.json() == {"status": "ok", "transcription": {**STATS, "sessions": 1}}


async def test_stats(audio_client):
    """The model's name, the counts, and the seconds since the start."""
    assert (await audio_client.get("/stats")).json() == {
        "model": "whisper-fake",
        "transcription": STATS,
        "uptime_s": 60.0,
    }


async def test_about_lists_the_endpoints_of_the_reference_first(audio_client):
    """Ten of them, in W-06's order; what came later follows."""
    body = (await audio_client.get("/v1")).json()

    assert (body["name"], body["model"], body["mode"]) == ("headrace-transcribe", "whisper-fake", "transcription")
    assert body["endpoints"][:10] == [
        "POST /v1/audio/transcriptions",
        "POST /v1/audio/translations",
        "POST /v1/audio/sessions",
        "POST /v1/audio/sessions/:id/audio",
        "POST /v1/audio/sessions/:id/finish",
        "DELETE /v1/audio/sessions/:id",
        "POST /admin/transcription/unload",
        "GET /v1/models",
        "GET /health",
        "GET /stats",
    ]


async def test_every_listed_endpoint_is_served(audio_client):
    """None of them is a 404 of the path, or a 405."""
    for endpoint in (await audio_client.get("/v1")).json()["endpoints"]:
        method, path = endpoint.split()
        if method == "WS":
            continue
        response = await audio_client.request(method, path)
        codes = {response.json()["error"]["code"]} if response.status_code >= 400 else set()
        assert not codes & {"not_found", "method_not_allowed"}, endpoint


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/whisper-fake", "/v1/models/any/name"])
async def test_models_are_the_one(audio_client, path):
    """Whatever the name: one list of one model, with the live flag."""
    (card,) = (await audio_client.get(path)).json()["data"]

    assert card == {
        "id": "whisper-fake",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "headrace",
        "transcription": True,
        "resident": True,
        "capabilities": {"transcription": True, "translation": True, "chat_completions": False},
    }


async def test_elsewhere_is_an_error_body(audio_client):
    """404 in OpenAI's envelope."""
    response = await audio_client.get("/v1/chat/completions")

    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


async def test_health_is_open_and_the_rest_asks_for_the_key(make_audio_client):
    """As everywhere."""
    async with make_audio_client(api_keys=("secret",)) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/stats")).status_code == 401
        assert (await client.post("/v1/audio/transcriptions")).status_code == 401
        assert (await client.get("/stats", headers={"authorization": "Bearer secret"})).status_code == 200
