"""Request ids, origins, hosts, keys, body limit, and what happens outside the routes."""

import httpx
import pytest

from headrace_http_api import LOOPBACK_HOSTS, create_app

CHAT_URL = "/v1/chat/completions"


async def test_request_id_is_kept_or_made(client):
    """A plain id of the client comes back; any other is replaced, so that no log line can be forged."""
    kept = await client.get("/health", headers={"x-request-id": "abc-1.2_3"})
    made = await client.get("/health", headers={"x-request-id": "a b"})

    assert kept.headers["x-request-id"] == "abc-1.2_3"
    assert len(made.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("header", "code"), [({}, "missing_api_key"), ({"authorization": "Basic k1"}, "missing_api_key")]
)
async def test_missing_key_is_a_401(make_client, chat_body, header, code):
    """Without a Bearer key a guarded path is refused and says how to send one."""
    async with make_client(api_keys=("k1",)) as client:
        reply = await client.post(CHAT_URL, json=chat_body, headers=header)

    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == code
    assert reply.headers["www-authenticate"] == "Bearer"


async def test_any_configured_key_opens_and_probes_stay_open(make_client, chat_body):
    """Each key works, another does not, and health and readiness need none."""
    async with make_client(api_keys=("k1", "schlüssel")) as client:

        async def status(key):
            return (await client.post(CHAT_URL, json=chat_body, headers={b"authorization": key})).status_code

        assert await status(b"Bearer k1") == 200
        assert await status("bearer schlüssel".encode()) == 200
        assert await status(b"Bearer k2") == 401
        for path in ("/health", "/ready"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/stats")).status_code == 401


async def test_body_above_the_limit_is_a_413(make_client):
    """The limit holds for the declared length, and for the real one when none is declared."""

    async def parts():
        for _ in range(5):
            yield b"x" * 50

    async with make_client(max_body_bytes=100) as client:
        declared = await client.post(CHAT_URL, content=b"x" * 101)
        streamed = await client.post(CHAT_URL, content=parts())
        within = await client.post(CHAT_URL, content=b"x" * 100)

    assert (declared.status_code, streamed.status_code, within.status_code) == (413, 413, 400)
    assert declared.json()["error"]["code"] == "payload_too_large"


async def test_foreign_page_cannot_post_and_sees_no_cors(client, chat_body):
    """A browser origin that is not allowed cannot run a request, nor read an answer."""
    foreign = {"origin": "https://evil.example"}
    post = await client.post(CHAT_URL, json=chat_body, headers=foreign)
    get = await client.get("/v1/models", headers=foreign)
    preflight = await client.options(CHAT_URL, headers=foreign | {"access-control-request-method": "POST"})

    assert (post.status_code, post.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert get.status_code == 200
    assert preflight.status_code == 403
    for reply in (post, get, preflight):
        assert "access-control-allow-origin" not in reply.headers


async def test_allowed_origin_gets_cors_on_answers_and_errors(make_client, chat_body):
    """An allowed page passes the preflight and can read answers and errors alike."""
    origin = "https://chat.example"
    async with make_client(allowed_origins=(origin,), api_keys=("k",)) as client:
        preflight = await client.options(
            CHAT_URL,
            headers={
                "origin": origin,
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization",
            },
        )
        refused = await client.post(CHAT_URL, json=chat_body, headers={"origin": origin})

    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    assert refused.status_code == 401
    for reply in (preflight, refused):
        assert reply.headers["access-control-allow-origin"] == origin


async def test_same_origin_page_needs_no_setting(client, chat_body):
    """A page that this server itself serves may post."""
    reply = await client.post(CHAT_URL, json=chat_body, headers={"origin": "http://127.0.0.1:8080"})

    assert reply.status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8080", 200),
        ("127.0.0.1", 200),
        ("[::1]:8080", 200),
        ("LOCALHOST", 200),
        ("evil.example:8080", 403),
        ("localhost.evil.example", 403),
    ],
)
async def test_only_expected_host_names_are_answered(make_client, host, status):
    """A DNS name that someone pointed at the loopback address reaches nothing."""
    async with make_client(allowed_hosts=LOOPBACK_HOSTS) as client:
        reply = await client.get("/v1/models", headers={"host": host})

    assert reply.status_code == status


async def test_unknown_path_and_wrong_method_have_the_envelope(client):
    """What the router refuses looks like every other error; a 405 tells the allowed methods."""
    unknown = await client.get("/v2/nothing")
    slash = await client.get("/v1/models/")
    method = await client.get(CHAT_URL)

    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    assert slash.status_code == 404
    assert (method.status_code, method.json()["error"]["code"]) == (405, "method_not_allowed")
    assert method.headers["allow"] == "POST"


async def test_unexpected_fault_is_a_500_with_the_request_id(services, models, chat_body, caplog):
    """A fault that nobody foresaw is answered and logged once, without the prompt."""
    models.gateway.refusal = KeyError("hi there")
    transport = httpx.ASGITransport(create_app(services), raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        reply = await client.post(CHAT_URL, json=chat_body, headers={"x-request-id": "r-9"})

    assert reply.status_code == 500
    assert "r-9" in reply.json()["error"]["message"]
    assert len([record for record in caplog.records if record.name.startswith("headrace")]) == 1
    assert "hi there" not in caplog.text
    assert models.num_leases == 0
