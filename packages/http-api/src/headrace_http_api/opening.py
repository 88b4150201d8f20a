"""From a validated request to running generations: lease, prompts, grammar, placement, submission."""

import asyncio
import uuid
from contextlib import AsyncExitStack, aclosing
from typing import TypeVar

from attrs import evolve, frozen

from headrace_http_api.dialect import Dialect
from headrace_http_api.encoded import EncodedPrompt, Envelope
from headrace_http_api.errors import InvalidRequest
from headrace_http_api.generation_request import GenerationFields
from headrace_http_api.ports import ServedModel
from headrace_http_api.running import Running, RunningPrompt
from headrace_http_api.sampling_fields import sampling_params
from headrace_http_api.services import ApiServices
from headrace_sampling import InvalidGrammar, check_grammar
from headrace_scheduling.requests import GenerateOptions, GenerationRequest, RequestShape

__all__ = ["LONG_PROMPT_BYTES", "Asked", "check_num_chars", "open_generations"]

# Above this, encoding takes long enough to delay the streams of others: a worker thread does it. It counts the body's
# bytes, since tool calls and template variables reach the template like the messages' texts.
LONG_PROMPT_BYTES = 4_000

# No vocabulary's tokens are this long on average, so a longer text needs no encoding to be too long.
MAX_CHARS_PER_TOKEN = 256

MAX_UNTHINKING_TEMPERATURE = 0.7

RequestT = TypeVar("RequestT", bound=GenerationFields)


@frozen
class Asked:
    """What is known of a request beside its fields: the size of its body, and whose stored prefixes it may use."""

    num_bytes: int
    tenant: str | None


async def open_generations(
    services: ApiServices, dialect: Dialect[RequestT], request: RequestT, asked: Asked, resources: AsyncExitStack
) -> Running[RequestT]:
    """Lease the model, build the prompts, place and submit. What is opened goes into `resources` at once.

    Raises:
        ApiError, SchedulingError: the request is refused; nothing runs.
    """
    served = await resources.enter_async_context(services.models.lease(request.model))
    options = _options(request, served)
    check_num_chars(dialect.num_chars(request), served.config.max_context)
    if dialect.runs_template or asked.num_bytes > LONG_PROMPT_BYTES:
        prompts = await asyncio.to_thread(dialect.encode, served, request)
    else:
        prompts = dialect.encode(served, request)
    await _check_grammar(prompts[0])
    requests = [_engine_request(request, prompt, options, asked.tenant) for prompt in prompts]
    # All are placed before the first is submitted, so that a refusal costs the engine nothing.
    placements = [served.gateway.place(RequestShape.of(one)) for one in requests]
    running: list[RunningPrompt] = []
    for prompt, placement, one in zip(prompts, placements, requests, strict=True):
        generation = await served.gateway.run(placement, one)
        await resources.enter_async_context(aclosing(generation))
        running.append(RunningPrompt(prompt, generation))
    envelope = Envelope(
        id=f"{dialect.id_prefix}{uuid.uuid4().hex}",
        created=int(services.clock()),
        model=served.name,
        system_fingerprint=f"fp_{served.identity[:12]}" if served.identity else None,
    )
    return Running(request, envelope, served, running)


def _engine_request(
    request: GenerationFields, prompt: EncodedPrompt, options: GenerateOptions, tenant: str | None
) -> GenerationRequest:
    return GenerationRequest(
        prompt_ids=tuple(prompt.ids),
        options=options,
        stable_boundary=prompt.stable_boundary,
        tenant=tenant,
        session_id=request.cache_session_id,
        priority=request.priority,
        timeout_s=request.timeout_s,
        grammar=prompt.grammar,
    )


async def _check_grammar(prompt: EncodedPrompt) -> None:
    if prompt.grammar is None:
        return
    try:
        await asyncio.to_thread(check_grammar, prompt.grammar)
    except InvalidGrammar as error:
        raise InvalidRequest(
            f"{prompt.grammar_param} cannot be served: {error}", param=prompt.grammar_param, code="invalid_grammar"
        ) from None


def check_num_chars(num_chars: int, max_context: int) -> None:
    """Refuse a text that is too long for the context whatever the vocabulary, before it costs the time of encoding.

    Raises:
        InvalidRequest: tells both lengths.
    """
    if num_chars > max_context * MAX_CHARS_PER_TOKEN:
        raise InvalidRequest(
            f"this model's maximum context length is {max_context} tokens here, and the prompt has {num_chars} "
            "characters, far more than they hold: shorten the prompt",
            code="context_length_exceeded",
        )


def _options(request: GenerationFields, served: ServedModel) -> GenerateOptions:
    requested = served.max_tokens if request.requested_max_tokens is None else request.requested_max_tokens
    num_top = request.num_top_logprobs
    if num_top is None and request.num_candidates > request.n:
        # The best replies are found by their log-probabilities.
        num_top = 0
    defaults = served.sampling_defaults
    if request.thinks is False:
        # Models that mostly think have defaults for that; an answer at once is better with less chance.
        defaults = evolve(defaults, temperature=min(defaults.temperature, MAX_UNTHINKING_TEMPERATURE))
    return GenerateOptions(
        # The engine samples one token behind every prompt.
        max_tokens=1 if request.drops_reply else requested,
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        sampling=sampling_params(request, defaults, served.config.vocab_size, logprobs=num_top),
        num_choices=request.num_candidates,
        prompt_logprobs=request.num_prompt_logprobs,
    )
