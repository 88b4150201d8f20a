"""A small fake gateway, codec and registry: what the routes need, and events to steer a generation by."""

import asyncio
import contextlib
from collections import deque

import httpx
import pytest
from attrs import define, field, frozen

from headrace_http_api import (
    ApiConfig,
    ApiServices,
    ModelCard,
    ModelNotFound,
    ModelStats,
    Readiness,
    SamplingDefaults,
    ServedConfig,
    ServedModel,
    ServerInfo,
    create_app,
)
from headrace_sampling import TokenLogprobs
from headrace_scheduling.errors import ContextOverBudget
from headrace_scheduling.events import Finished, GenerateStats, TextDelta
from headrace_scheduling.requests import ExecutionPlan, GenerationPlacement, GenerationRequest

VOCAB_SIZE = 1000
MAX_CONTEXT = 512
CREATED = 1_700_000_000


@frozen
class Prepared:
    ids: tuple[int, ...]
    stable_boundary: int | None = None
    starts_in_reasoning: bool = False


@define
class FakeCodec:
    """Encodes each character as one id; `chats` records what templates were asked to render."""

    has_chat_template: bool = True
    special_tokens: dict = field(factory=lambda: {"eos_token": "<end>"})
    refusal: Exception | None = None
    chats: list = field(factory=list)
    tools: list = field(factory=list)
    efforts: list = field(factory=list)
    starts_in_reasoning: bool = False
    template: str = ""
    threads: list = field(factory=list)
    remembered: list = field(factory=list)

    def remember(self, token_ids):
        self.remembered.append(list(token_ids))

    def encode(self, text, *, add_special_tokens=True):
        import threading

        self.threads.append(threading.current_thread())
        return [ord(c) % VOCAB_SIZE for c in text]

    def template_source(self, *, with_tools):
        return self.template

    def decode(self, token_ids, *, skip_special_tokens=True):
        return "".join(chr(token_id) for token_id in token_ids if token_id > 1 or not skip_special_tokens)

    def token_bytes(self, token_id):
        return chr(token_id).encode()

    def prepare_chat(self, messages, *, tools=None, reasoning_effort=None, template_kwargs=None):
        if self.refusal is not None:
            raise self.refusal
        self.chats.append((messages, template_kwargs))
        self.tools.append(tools)
        self.efforts.append(reasoning_effort)
        ids = [1]
        for message in messages:
            ids += self.encode(message["content"])
        return Prepared(tuple(ids), starts_in_reasoning=self.starts_in_reasoning)

    def render_chat(self, messages, *, tools=None, reasoning_effort=None, template_kwargs=None):
        if self.refusal is not None:
            raise self.refusal
        self.chats.append((messages, template_kwargs))
        self.tools.append(tools)
        self.efforts.append(reasoning_effort)
        turns = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        opens = (template_kwargs or {}).get("add_generation_prompt", True)
        return f"{turns}<assistant>" if opens else turns


@define(eq=False)
class FakeGeneration:
    """Plays a script of texts, deltas, exceptions and events to wait for; a text is told of each choice in turn."""

    gateway: "FakeGateway"
    script: deque
    request: GenerationRequest
    closed: asyncio.Event = field(factory=asyncio.Event)
    num_deltas: int = 0
    waiting: deque = field(factory=deque)
    is_over: bool = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        while self.script or self.waiting:
            if self.waiting:
                return self.waiting.popleft()
            item = self.script.popleft()
            if isinstance(item, asyncio.Event):
                self.gateway.waiting.set()
                await item.wait()
            elif isinstance(item, Exception):
                raise item
            elif isinstance(item, TextDelta):
                self.num_deltas += item.choice == 0
                return item
            else:
                self.num_deltas += 1
                self.waiting += [self._delta(item, choice) for choice in range(self.request.options.num_choices)]
        self.is_over = True
        raise StopAsyncIteration

    def _delta(self, text, choice):
        num_top = self.request.options.sampling.logprobs
        return TextDelta(text, (7,), () if num_top is None else (scored(7, num_top),), choice)

    @property
    def prompt_logprobs(self):
        num_top = self.request.options.prompt_logprobs
        return () if num_top is None else tuple(scored(token_id, num_top) for token_id in self.request.prompt_ids[1:])

    @property
    def finished_choices(self):
        stats = GenerateStats(
            num_prompt_tokens=len(self.request.prompt_ids),
            num_cached_tokens=2,
            num_generated_tokens=self.num_deltas,
            queue_s=0.0,
            prefill_s=0.1,
            decode_s=0.1,
        )
        totals = self.gateway.totals or [None] * self.request.options.num_choices
        return tuple(
            Finished(
                reason=self.gateway.reason,
                stats=stats,
                stop_string=self.gateway.stop_string,
                cumulative_logprob=totals[choice],
            )
            for choice in range(self.request.options.num_choices)
        )

    @property
    def num_unread_tokens(self):
        return self.gateway.num_unread_tokens

    def end_of(self, choice):
        return self.finished_choices[choice] if self.is_over else None

    async def aclose(self):
        self.closed.set()


def scored(token_id, num_top):
    """A token's log-probability, with candidates counted down from it."""
    top = tuple((token_id + place, -0.5 - place) for place in range(num_top))
    return TokenLogprobs(token_id=token_id, logprob=-0.5, top=top)


@define(eq=False)
class FakeGateway:
    """`script` is what each generation plays; `scripts`, by prompt, goes before it."""

    script: list = field(factory=lambda: ["Hel", "", "lo"])
    scripts: dict = field(factory=dict)
    reason: str = "stop"
    stop_string: str | None = None
    totals: list | None = None
    refusal: Exception | None = None
    shapes: list = field(factory=list)
    requests: list = field(factory=list)
    generations: list = field(factory=list)
    waiting: asyncio.Event = field(factory=asyncio.Event)
    num_unread_tokens: int = 0

    def place(self, shape):
        self.shapes.append(shape)
        if shape.num_prompt_tokens >= MAX_CONTEXT:
            raise ContextOverBudget(shape.num_prompt_tokens, MAX_CONTEXT)
        rest = MAX_CONTEXT - shape.num_prompt_tokens
        return GenerationPlacement(
            shape=shape, mechanism="continuous", plan=ExecutionPlan(), max_tokens=min(shape.max_tokens or rest, rest)
        )

    async def run(self, placement, request):
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        script = self.scripts.get(request.prompt_ids, self.script)
        generation = FakeGeneration(self, deque(script), request)
        self.generations.append(generation)
        return generation


@define(eq=False)
class FakeModels:
    gateway: FakeGateway = field(factory=FakeGateway)
    codec: FakeCodec = field(factory=FakeCodec)
    name: str = "org/tiny"
    num_leases: int = 0
    temperature: float = 0.7
    state: Readiness = field(factory=lambda: Readiness(ready=True, status="ready"))
    capabilities: frozenset = frozenset({"chat", "completions"})

    @contextlib.asynccontextmanager
    async def lease(self, name):
        if name not in (None, "default_model", self.name):
            raise ModelNotFound(name)
        self.num_leases += 1
        try:
            yield ServedModel(
                name=self.name,
                created=CREATED,
                gateway=self.gateway,
                codec=self.codec,
                config=ServedConfig(vocab_size=VOCAB_SIZE, max_context=MAX_CONTEXT),
                capabilities=self.capabilities,
                sampling_defaults=SamplingDefaults(temperature=self.temperature),
                identity="0123456789abcdef",
            )
        finally:
            self.num_leases -= 1

    def cards(self):
        return [ModelCard(name=self.name, created=CREATED, max_context=MAX_CONTEXT)]

    def readiness(self):
        return self.state

    def stats(self):
        return [ModelStats(name=self.name, state="ready", num_running=3)]


@pytest.fixture
def models():
    return FakeModels()


@pytest.fixture
def services(models):
    server = ServerInfo(name="headrace", version="0.1.0", started_at=float(CREATED))
    return ApiServices(models=models, server=server, clock=lambda: CREATED + 60.0)


@pytest.fixture
def make_client(services):
    """Make an HTTP client of an application with the given settings, without a socket."""

    def make(**settings):
        app = create_app(services, ApiConfig(**settings))
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8080")

    return make


@pytest.fixture
async def client(make_client):
    async with make_client() as opened:
        yield opened


@contextlib.asynccontextmanager
async def running_server(app):
    """Serve an application with uvicorn on a free loopback port; yields its base URL."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off"))
    server.install_signal_handlers = lambda: None
    started = asyncio.Event()
    startup = server.startup

    async def startup_and_tell(sockets=None):
        await startup(sockets=sockets)
        started.set()

    server.startup = startup_and_tell
    task = asyncio.create_task(server.serve())
    await started.wait()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


@pytest.fixture
def serve():
    """What serves an application on a real socket: an async context manager that gives its base URL."""
    return running_server


@pytest.fixture
async def make_url(services):
    """Serve an application with the given settings on a socket."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(**settings):
            app = create_app(services, ApiConfig(**settings))
            return await stack.enter_async_context(running_server(app))

        yield make


@pytest.fixture
async def base_url(make_url):
    return await make_url()


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def chat_body():
    return {**CHAT, "messages": [dict(message) for message in CHAT["messages"]]}
