"""From a request to a running generation, and from a generation to a JSON body or a stream."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack, aclosing
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from attrs import frozen
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from headrace_http_api.dialect import Dialect, EncodedPrompt, Envelope, usage_body
from headrace_http_api.disconnect import run_until_disconnect
from headrace_http_api.error_table import reply_to
from headrace_http_api.errors import ClientDisconnected, InvalidRequest
from headrace_http_api.generation_request import ACCEPTED_WITHOUT_EFFECT, GenerationFields
from headrace_http_api.json_body import field_path, parse_object
from headrace_http_api.middleware import request_id_of, tenant_of
from headrace_http_api.ports import Generation, ServedModel
from headrace_http_api.services import ApiServices
from headrace_http_api.sse import DONE, EventStream, compact_json, frame
from headrace_http_api.unsupported import refuse_unsupported
from headrace_http_api.validation import unknown_names
from headrace_sampling import SamplingParams
from headrace_scheduling.events import Finished
from headrace_scheduling.requests import GenerateOptions, GenerationRequest, RequestShape

__all__ = ["IGNORED_HEADER", "LONG_PROMPT_BYTES", "answer"]

_logger = logging.getLogger(__name__)

# Above these, encoding and parsing take long enough to delay the streams of others: a worker thread does them. Both
# count the body's bytes, since tool calls and template variables reach the template like the messages' texts.
LONG_PROMPT_BYTES = 4_000
LONG_BODY_BYTES = 64 * 1024

# No vocabulary's tokens are this long on average, so a longer text needs no encoding to be too long.
MAX_CHARS_PER_TOKEN = 256

IGNORED_HEADER = "x-headrace-ignored"
MAX_IGNORED_NAMES = 32

RequestT = TypeVar("RequestT", bound=GenerationFields)


@frozen
class _Running(Generic[RequestT]):
    """An admitted generation and what its answer needs."""

    request: RequestT
    generation: Generation
    envelope: Envelope
    served: ServedModel
    prompt: EncodedPrompt

    async def remember(self, reply_ids: list[int]) -> None:
        """Let the codec know what the reply was made of. Without it the next turn only computes more."""
        if not self.prompt.is_chat:
            return
        try:
            await asyncio.to_thread(self.served.codec.remember, [*self.prompt.ids, *reply_ids])
        except Exception as error:  # noqa: BLE001 - a codec may raise anything, and the reply is whole
            _logger.warning("a reply's token ids could not be remembered: %s", type(error).__name__)


async def answer(http: Request, services: ApiServices, dialect: Dialect[RequestT]) -> ASGIApp:
    """Serve one generating request; the response is a JSON body or an event stream.

    Every refusal is raised from here, before a response has started. The generation is closed at once when the
    client leaves, streaming or not.
    """
    body, num_bytes = await _read_body(http)
    refuse_unsupported(body, dialect.unsupported)
    request = dialect.read(body)
    headers = _ignored_header(body, type(request), ACCEPTED_WITHOUT_EFFECT | dialect.unsupported.keys())
    resources = AsyncExitStack()
    try:
        tenant = tenant_of(http.scope, request.cache_salt)
        opening = _open(services, dialect, request, num_bytes, resources, tenant)
        running = await run_until_disconnect(http.receive, opening)
        if not request.stream:
            content = await run_until_disconnect(http.receive, _collect(running, dialect))
            await resources.aclose()
            return JSONResponse(content, headers=headers)
    except BaseException:
        await resources.aclose()
        raise
    frames = _frames(running, dialect, request_id_of(http.scope))
    return EventStream(frames, resources=resources, headers=headers)


# ---- in ------------------------------------------------------------------------------------------------------


async def _read_body(http: Request) -> tuple[dict[str, Any], int]:
    """Return the parsed body and its size in bytes."""
    try:
        body = await http.body()
    except ClientDisconnect:
        raise ClientDisconnected from None
    if len(body) > LONG_BODY_BYTES:
        return await asyncio.to_thread(parse_object, body), len(body)
    return parse_object(body), len(body)


def _ignored_header(
    body: Mapping[str, Any], kind: type[GenerationFields], accepted: AbstractSet[str]
) -> dict[str, str]:
    names = unknown_names(body, kind, accepted)[:MAX_IGNORED_NAMES]
    # Percent-encoded and cut, because names come from the client and headers carry neither line ends nor much text.
    return {IGNORED_HEADER: ", ".join(quote(name[:64], safe="")[:64] for name in names)} if names else {}


async def _open(
    services: ApiServices,
    dialect: Dialect[RequestT],
    request: RequestT,
    num_bytes: int,
    resources: AsyncExitStack,
    tenant: str | None,
) -> _Running[RequestT]:
    """Lease the model, build the prompt, place and submit. What is opened goes into `resources` at once."""
    served = await resources.enter_async_context(services.models.lease(request.model))
    options = _options(request, served)
    _check_num_chars(dialect.num_chars(request), served.config.max_context)
    if dialect.runs_template or num_bytes > LONG_PROMPT_BYTES:
        prompt = await asyncio.to_thread(dialect.encode, served, request)
    else:
        prompt = dialect.encode(served, request)
    asked = GenerationRequest(
        prompt_ids=tuple(prompt.ids),
        options=options,
        stable_boundary=prompt.stable_boundary,
        tenant=tenant,
        session_id=request.cache_session_id,
        priority=request.priority,
    )
    generation = await served.gateway.run(served.gateway.place(RequestShape.of(asked)), asked)
    await resources.enter_async_context(aclosing(generation))
    envelope = Envelope(
        id=f"{dialect.id_prefix}{uuid.uuid4().hex}",
        created=int(services.clock()),
        model=served.name,
        system_fingerprint=f"fp_{served.identity[:12]}" if served.identity else None,
    )
    return _Running(request, generation, envelope, served, prompt)


def _check_num_chars(num_chars: int, max_context: int) -> None:
    if num_chars > max_context * MAX_CHARS_PER_TOKEN:
        raise InvalidRequest(
            f"the prompt has {num_chars} characters, far more than this server's context of {max_context} tokens "
            "holds: shorten the prompt",
            code="context_length_exceeded",
        )


def _options(request: GenerationFields, served: ServedModel) -> GenerateOptions:
    requested = request.requested_max_tokens
    return GenerateOptions(
        max_tokens=served.max_tokens if requested is None else requested,
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        sampling=_sampling(request, served),
    )


def _sampling(request: GenerationFields, served: ServedModel) -> SamplingParams:
    defaults, vocab_size = served.sampling_defaults, served.config.vocab_size
    for token_id in request.logit_bias or ():
        if token_id >= vocab_size:
            path = field_path("logit_bias", str(token_id))
            raise InvalidRequest(
                f"{path} is outside the vocabulary; token ids of this model lie between 0 and {vocab_size - 1}",
                param=path,
            )
    top_k = defaults.top_k if request.top_k is None else request.top_k
    return SamplingParams(
        temperature=defaults.temperature if request.temperature is None else request.temperature,
        top_p=defaults.top_p if request.top_p is None else request.top_p,
        # -1 is how some clients say "off", and a k above the vocabulary filters nothing.
        top_k=min(max(top_k, 0), vocab_size),
        min_p=defaults.min_p if request.min_p is None else request.min_p,
        logit_bias=request.logit_bias or {},
        seed=request.seed,
    )


# ---- out -----------------------------------------------------------------------------------------------------


async def _collect(running: _Running[RequestT], dialect: Dialect[RequestT]) -> dict[str, object]:
    deltas = [delta async for delta in running.generation]
    text = "".join(delta.text for delta in deltas)
    finished = running.generation.finished
    await running.remember([token_id for delta in deltas for token_id in delta.token_ids])
    body = running.envelope.body(dialect.object_name, [dialect.choice(text, finished)])
    return body | {"usage": usage_body(finished.stats)}


async def _frames(
    running: _Running[RequestT], dialect: Dialect[RequestT], request_id: str
) -> AsyncGenerator[bytes, None]:
    writer = _ChunkWriter(running, dialect)
    head = dialect.head_choice()
    if head is not None:
        yield writer.chunk(head)
    reply_ids: list[int] = []
    try:
        async for delta in running.generation:
            reply_ids.extend(delta.token_ids)
            if delta.text:
                yield writer.delta(delta.text)
        finished = running.generation.finished
        await running.remember(reply_ids)
    except Exception as exc:  # noqa: BLE001 - the response has started, so the table's answer travels as an event
        yield frame(reply_to(exc, request_id).body)
        return
    yield writer.end(finished)


class _ChunkWriter(Generic[RequestT]):
    """Writes the chunks of one stream; what is the same in each delta is serialised once."""

    def __init__(self, running: _Running[RequestT], dialect: Dialect[RequestT]) -> None:
        self._envelope = running.envelope
        self._dialect = dialect
        self._includes_usage = running.request.includes_usage
        # A fresh random mark, so that no name in the chunk can be taken for it.
        mark = uuid.uuid4().hex
        before, _, after = self.chunk(dialect.delta_choice(mark)).partition(compact_json(mark).encode())
        self._before, self._after = before, after

    def delta(self, text: str) -> bytes:
        return b"".join((self._before, compact_json(text).encode(), self._after))

    def chunk(self, choice: dict[str, object]) -> bytes:
        body = self._envelope.body(self._dialect.chunk_object_name, [choice])
        return frame(body | {"usage": None} if self._includes_usage else body)

    def end(self, finished: Finished) -> bytes:
        last = self.chunk(self._dialect.last_choice(finished))
        if not self._includes_usage:
            return last + DONE
        usage = self._envelope.body(self._dialect.chunk_object_name, [])
        return last + frame(usage | {"usage": usage_body(finished.stats)}) + DONE
