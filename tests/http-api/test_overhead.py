"""The absolute price of a streamed token (design 6)."""

import asyncio
import time

from headrace_http_api import create_app

NUM_TOKENS = 5_000
LIMIT_S = 100e-6


async def test_streamed_token_stays_within_its_cpu_budget(services, models):
    """Routing, JSON and SSE cost at most 100 microseconds of CPU time per streamed token."""
    models.gateway.script = ["token "] * NUM_TOKENS
    body = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"host", b"localhost")],
        "query_string": b"",
        "scheme": "http",
        "http_version": "1.1",
        "asgi": {"version": "3.0"},
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    never = asyncio.Event()
    num_frames = 0

    async def receive():
        if not messages:
            await never.wait()
        return messages.pop()

    async def send(message):
        nonlocal num_frames
        num_frames += message["type"] == "http.response.body"

    app = create_app(services)
    start = time.process_time()
    await app(scope, receive, send)
    cost_s = (time.process_time() - start) / NUM_TOKENS

    assert num_frames == NUM_TOKENS + 3
    assert cost_s < LIMIT_S
