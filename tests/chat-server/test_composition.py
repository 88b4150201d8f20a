"""The parts put together, over both transports, on small deterministic models."""

from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
from attrs import frozen

from headrace_chat_server.composition import compose
from headrace_chat_server.errors import ModelUnavailable
from headrace_chat_server.settings import build
from headrace_chat_server.text_side import TextSide
from headrace_http_api import SamplingDefaults
from headrace_models import ModelSource, SourceError
from headrace_scheduling.testing import FailingModel, FakeCodec, FakeLoader, ModelLoaderFake, ScriptedModel

SOURCE = ModelSource(name="toy", path=Path("/no/such/folder"), format="folder")
TRANSPORTS = pytest.mark.parametrize("transport", ["thread", "process"])


@frozen(kw_only=True)
class Prompt:
    ids: list[int]
    stable_boundary: int | None = None
    starts_in_reasoning: bool = False


class ToyCodec(FakeCodec):
    """Bytes, with the bare contents of a chat as its template."""

    has_chat_template = True
    special_tokens: ClassVar = {}

    def template_source(self, *, with_tools):
        return ""

    def prepare_chat(self, messages, *, tools=None, reasoning_effort=None, template_kwargs=None):
        return Prompt(ids=self.encode(self.render_chat(messages)))

    def render_chat(self, messages, *, tools=None, reasoning_effort=None, template_kwargs=None):
        return "".join(str(message["content"]) for message in messages)

    def encode(self, text, *, add_special_tokens=True):
        return super().encode(text)

    def decode(self, token_ids, *, skip_special_tokens=True):
        return super().decode(token_ids)


def load_toy_text() -> TextSide:
    return TextSide(codec=ToyCodec(), sampling_defaults=SamplingDefaults(temperature=0.0))


@asynccontextmanager
async def serving(transport, *, make_model=ScriptedModel, headers=None, **values):
    settings = build({"engine.transport": transport, "engine.max_tokens": 6} | values)
    composition = compose(settings, SOURCE, loader=ModelLoaderFake(make_model), load_text=load_toy_text)
    await composition.start()
    try:
        app = httpx.ASGITransport(app=composition.make_app())
        async with httpx.AsyncClient(transport=app, base_url="http://localhost", headers=headers) as client:
            yield composition, client
    finally:
        await composition.close()


async def ask(client, text="hello", **fields):
    return await client.post("/v1/completions", json={"prompt": text} | fields)


@TRANSPORTS
async def test_readiness_follows_the_engine(transport):
    """Not ready before the engine is, ready after, not ready when drained; health stays."""
    async with serving(transport) as (composition, client):
        assert (await client.get("/ready")).status_code == 503
        assert (await ask(client)).status_code == 503
        await composition.wait_ready()
        assert (await client.get("/ready")).status_code == 200
        answer = await ask(client)
        assert answer.status_code == 200
        # The operator's limit holds where the request names none.
        assert answer.json()["usage"]["completion_tokens"] <= 6
        assert await composition.gateway.drain(5)
        drained = await client.get("/ready")
        assert drained.status_code == 503
        assert drained.json()["status"] in {"draining", "stopped"}
        refused = await ask(client)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert (await client.get("/health")).status_code == 200


@TRANSPORTS
async def test_a_failing_step_costs_its_request_and_nothing_else(transport):
    """An exception in a forward step is a 500 for whom it hit; the server stays ready and serves the next one."""
    make_model = partial(FailingModel, failing_forwards=frozenset({2}))
    async with serving(transport, make_model=make_model) as (composition, client):
        await composition.wait_ready()
        failed = await ask(client)
        assert failed.status_code == 500
        assert failed.json()["error"]["code"] == "engine_failed"
        assert "hello" not in failed.text
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        assert (await ask(client)).status_code == 200


@TRANSPORTS
@pytest.mark.parametrize(
    ("loader", "load_text"),
    [
        (FakeLoader(error="weights are broken"), load_toy_text),
        (ModelLoaderFake(ScriptedModel), lambda: (_ for _ in ()).throw(SourceError("weights are broken"))),
    ],
    ids=["engine", "codec"],
)
async def test_a_model_that_cannot_be_loaded_is_one_error(transport, loader, load_text):
    """Whichever half fails to load, waiting ends with the reason, and the server never claims to be ready."""
    settings = build({"engine.transport": transport})
    composition = compose(settings, SOURCE, loader=loader, load_text=load_text)
    await composition.start()
    try:
        with pytest.raises(ModelUnavailable, match="weights are broken"):
            await composition.wait_ready()
        assert not composition.registry.readiness().ready
    finally:
        await composition.close()


async def test_keys_and_hosts_come_from_the_settings():
    """A key of the settings opens the API and nothing else does; a loopback server refuses foreign host names."""
    async with serving("thread", **{"server.api_keys": ("k1", "k2")}) as (composition, client):
        await composition.wait_ready()
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/v1/models", headers={"authorization": "Bearer k2"})).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        foreign = {"host": "evil.example", "authorization": "Bearer k1"}
        assert (await client.get("/v1/models", headers=foreign)).status_code == 403


async def test_an_open_address_accepts_any_host_name():
    """Behind another address the server cannot know by which names it is reached."""
    values = {"server.host": "0.0.0.0", "server.api_keys": ("k",)}
    headers = {"authorization": "Bearer k", "host": "box.local"}
    async with serving("thread", headers=headers, **values) as (composition, client):
        await composition.wait_ready()
        assert (await client.get("/v1/models")).status_code == 200


async def test_the_queue_limit_is_the_setting():
    """More outstanding requests than --max-queue are refused; none at all is still ready."""
    async with serving("thread", **{"engine.max_queue": 1}) as (composition, client):
        await composition.wait_ready()
        assert (await client.get("/stats")).json()["models"]["toy"]["requests"]["max_outstanding"] == 1
        assert composition.gateway.stats().max_outstanding == 1


@TRANSPORTS
async def test_stored_prompts_outlive_the_server(transport, tmp_path):
    """Law: with a folder, a second server goes on where the first one ended; without one it begins anew."""
    text = "A mill stands at the river, and the river turns the mill. " * 3
    folder = {"engine.prompt_cache_dir": str(tmp_path / "prompts")}
    cached = []
    for values in (folder, folder, {}):
        async with serving(transport, **values) as (composition, client):
            await composition.wait_ready()
            usage = (await ask(client, text)).json()["usage"]
            cached.append(usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))
            if values:
                assert await composition.gateway.drain(5)
    assert cached == [0, len(text) - 1, 0]
