"""How a reply ends and what it counts, streamed and whole, in both routes, on a model that follows a script."""

import asyncio
import contextlib
import json

import httpx
import mlx.core as mx
import pytest
import pytest_asyncio
from attrs import define, field, frozen

from headrace_http_api import ApiServices, ServedConfig, ServedModel, ServerInfo, create_app
from headrace_kvcache import KVCache, attend
from headrace_sampling import GrammarCompiler, TokenizerFacts
from headrace_scheduling import EngineConfig, GenerationGateway, ThreadEnginePort
from headrace_scheduling.testing import FakeCodec, ModelLoaderFake
from headrace_scheduling.testing.loading import FakeFacts

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS, POISON = 256, 1
# Of every prompt, so that a reply's n-th token is the prompt's.
PROMPT_TOKENS = 96
MAX_POSITIONS = 1024
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class CopyModel:
    """Writes the prompt again: each position attends to the one `PROMPT_TOKENS - 1` before it.

    A decode step that is fed `POISON` raises, as a device would.
    """

    weights_bytes = 0
    config = FakeFacts(max_positions=MAX_POSITIONS)

    def make_cache(self):
        return [KVCache()]

    def forward_hidden(self, ids, caches, *, context=None):
        num_tokens = ids.shape[1]
        if num_tokens == 1 and mx.any(ids == POISON).item():
            raise ArithmeticError("the script says so")
        positions = mx.reshape(mx.array(caches[0].offset), (-1, 1)) + mx.arange(num_tokens)
        places = mx.arange(MAX_POSITIONS)
        keys = (positions[..., None] == places).astype(mx.float32)
        queries = (mx.maximum(positions + 1 - PROMPT_TOKENS, 0)[..., None] == places).astype(mx.float32)
        values = ids[:, None, :, None].astype(mx.float32)
        return attend(caches[0], queries[:, None], keys[:, None], values, scale=40.0)[:, 0]

    def logits_from_hidden(self, hidden):
        return -100.0 * mx.square(hidden - mx.arange(self.config.vocab_size))

    def row_context(self, *, adapters=(), media=None):
        return None

    def batch_context(self, rows):
        return None


COMPILER = GrammarCompiler(
    TokenizerFacts(
        vocab_size=257,
        eos_token_ids=(EOS,),
        tokens=(*(bytes([n]) for n in range(256)), b""),
        special_token_ids=(EOS,),
    )
)


def script_ids(script):
    """The prompt that makes `CopyModel` write a script."""
    return [*script, *[ord(".")] * (PROMPT_TOKENS - len(script))]


@frozen
class Prepared:
    ids: list
    stable_boundary: None = None
    starts_in_reasoning: bool = False


class ScriptCodec(FakeCodec):
    """A chat's prompt is the script that its message names; the template is of the hermes family."""

    has_chat_template = True

    def template_source(self, *, with_tools):
        return "<tool_call>"

    def token_bytes(self, token_id):
        return bytes([token_id]) if token_id < EOS else b""

    def prepare_chat(self, messages, **options):
        return Prepared(script_ids(SCRIPTS[messages[-1]["content"]]))

    def remember(self, token_ids):
        pass


class RecordingGateway(GenerationGateway):
    """Keeps the generation that was started last."""

    last = None

    async def run(self, *arguments, **options):
        self.last = await super().run(*arguments, **options)
        return self.last


@define
class Models:
    gateway: RecordingGateway
    codec: ScriptCodec = field(factory=ScriptCodec)

    @contextlib.asynccontextmanager
    async def lease(self, name):
        config = ServedConfig(vocab_size=257, max_context=MAX_POSITIONS)
        yield ServedModel(name="script", created=0, gateway=self.gateway, codec=self.codec, config=config)

    def cards(self):
        return []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway():
    config = EngineConfig(
        loader=ModelLoaderFake(CopyModel), compile_grammar=lambda loaded, spec: COMPILER.compile(spec), max_rows=2
    )
    opened = RecordingGateway(ThreadEnginePort(config))
    await opened.start()
    await opened.wait_ready(60)
    yield opened
    await opened.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(gateway):
    services = ApiServices(models=Models(gateway), server=ServerInfo(name="headrace", version="0", started_at=0.0))
    transport = httpx.ASGITransport(create_app(services))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as opened:
        yield opened


def ended(text):
    return [*text.encode(), EOS]


SCRIPTS = {
    "eos": ended("Hi there"),
    "eos at the limit": ended("Hi there"),
    "limit": ended("Hi there"),
    "limit within a character": ended("Hi \N{SNOWMAN}"),
    "stop string": ended("Hi STOP there"),
    "stop string that EOS completes not": ended("Hi STO"),
    "stop string that the limit completes not": ended("Hi STOP"),
    "opener of a call at the end": ended("Hi <tool_c"),
    "tool call": ended(CALL),
    "tool call cut by the limit": ended(CALL),
    "grammar end": ended("yes indeed"),
    "cancel": list(b"again "),
    "error": [*b"Hi", POISON, EOS],
}
FIELDS = {
    "eos at the limit": {"max_tokens": 9},
    "limit": {"max_tokens": 4},
    "limit within a character": {"max_tokens": 4},
    "stop string": {"stop": ["STOP"]},
    "stop string that EOS completes not": {"stop": ["STOP"]},
    "stop string that the limit completes not": {"stop": ["STOP"], "max_tokens": 6},
    "tool call cut by the limit": {"max_tokens": 57},
    "grammar end": {"guided_choice": ["yes"]},
}
# finish_reason, stop_reason, generated tokens (a final EOS included), content.
ENDS = {
    "eos": ("stop", None, 9, "Hi there"),
    "eos at the limit": ("stop", None, 9, "Hi there"),
    "limit": ("length", None, 4, "Hi t"),
    "limit within a character": ("length", None, 4, "Hi "),
    "stop string": ("stop", "STOP", 7, "Hi "),
    "stop string that EOS completes not": ("stop", None, 7, "Hi STO"),
    "stop string that the limit completes not": ("length", None, 6, "Hi STO"),
    "opener of a call at the end": ("stop", None, 11, "Hi <tool_c"),
    "tool call": ("tool_calls", None, len(CALL) + 1, ""),
    "tool call cut by the limit": ("length", None, 57, ""),
    "grammar end": ("stop", None, 3, "yes"),
}
TOOL_ARGUMENTS = {"tool call": [{"city": "Rome"}], "tool call cut by the limit": [{"city": "Ro"}]}
ERRORS = {"cancel": (503, "generation_cancelled"), "error": (500, "engine_failed")}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def body_of(case, route):
    fields = {"temperature": 0} | FIELDS.get(case, {})
    if route == COMPLETION:
        return fields | {"prompt": script_ids(SCRIPTS[case])}
    return (
        fields
        | {"messages": [{"role": "user", "content": case}], "tools": [TOOL]}
        | ({"tool_choice": "none"} if "guided_choice" in fields else {})
    )


async def ask(client, gateway, case, route, *, stream):
    """Post, and cancel what was started if the case says so."""
    body = body_of(case, route)
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    num_tokens = gateway.stats().status.num_generated_tokens
    call = asyncio.create_task(client.post(route, json=body))
    if case == "cancel":
        async with asyncio.timeout(20):
            while gateway.stats().status.num_generated_tokens == num_tokens:  # noqa: ASYNC110 - counts tell no changes
                await asyncio.sleep(0)
        await gateway.last.aclose()
    return await call


@frozen
class Told:
    """What a stream told, put together."""

    content: str
    calls: list
    ends: list
    errors: list
    usages: list
    is_done: bool


def read_stream(text):
    events = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", [])]
    deltas = [choice.get("delta", {"content": choice.get("text")}) for choice in choices]
    calls = {}
    for part in (part for delta in deltas for part in delta.get("tool_calls", [])):
        call = calls.setdefault(part["index"], {"name": "", "arguments": ""})
        for name, value in part["function"].items():
            call[name] += value
    ends = [(choice["finish_reason"], choice["stop_reason"]) for choice in choices if choice["finish_reason"]]
    assert not ends or choices[-1]["finish_reason"], "nothing follows the end"
    return Told(
        content="".join(delta.get("content") or "" for delta in deltas),
        calls=list(calls.values()),
        ends=ends,
        errors=[chunk["error"]["code"] for chunk in chunks if "error" in chunk],
        usages=[chunk["usage"] for chunk in chunks if chunk.get("usage")],
        is_done=events.count("[DONE]") == 1 and events[-1] == "[DONE]",
    )


@pytest.mark.parametrize("route", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize("case", ENDS)
async def test_reasons_and_counts_are_those_of_the_whole_answer(client, gateway, case, route):
    """One end, for the right reason, with the matched stop; the same text, calls and usage streamed and whole."""
    whole = (await ask(client, gateway, case, route, stream=False)).json()
    told = read_stream((await ask(client, gateway, case, route, stream=True)).text)
    reason, stop, num_tokens, content = ENDS[case]
    if route == COMPLETION and case.startswith("tool call"):
        reason, content = ("length", CALL[:57]) if "cut" in case else ("stop", CALL)
    (choice,) = whole["choices"]
    message = choice.get("message", {"content": choice.get("text")})
    calls = [call["function"] for call in message.get("tool_calls", [])]

    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)
    assert told.ends == [(reason, stop)]
    assert (message["content"] or "") == told.content == content
    assert calls == told.calls
    arguments = [json.loads(call["arguments"]) for call in calls]
    assert arguments == (TOOL_ARGUMENTS.get(case, []) if route == CHAT else [])
    counted = {name: whole["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert counted == {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": num_tokens,
        "total_tokens": PROMPT_TOKENS + num_tokens,
    }
    (usage,) = told.usages
    assert {name: usage[name] for name in counted} == counted
    assert told.errors == []
    assert told.is_done


@pytest.mark.parametrize("route", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize("case", ERRORS)
async def test_what_does_not_finish_is_one_error(client, gateway, case, route):
    """A status for a whole answer, one event for a stream; no reason, no usage, no [DONE]; the next request works."""
    status, code = ERRORS[case]
    whole = await ask(client, gateway, case, route, stream=False)
    told = read_stream((await ask(client, gateway, case, route, stream=True)).text)

    assert (whole.status_code, whole.json()["error"]["code"]) == (status, code)
    assert (told.errors, told.ends, told.usages, told.is_done) == ([code], [], [], False)
    assert (await ask(client, gateway, "eos", route, stream=False)).status_code == 200
