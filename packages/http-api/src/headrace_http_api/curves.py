"""`POST /signal` and `POST /generate`: what a curve designer shows under its curve, and samples drawn by it."""

import asyncio
import re
import secrets
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

from attrs import asdict, frozen
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from headrace_http_api.conversation_fields import cannot_render
from headrace_http_api.curve_requests import CurveRequest, SignalRequest, make_curve_converter
from headrace_http_api.disconnect import run_until_disconnect
from headrace_http_api.encoded import check_capability, check_ids
from headrace_http_api.middleware import tenant_of
from headrace_http_api.opening import check_num_chars
from headrace_http_api.ports import Generation, ServedModel
from headrace_http_api.request_body import ignored_header, read_body
from headrace_http_api.services import ApiServices
from headrace_http_api.validation import structure
from headrace_sampling import SamplingParams, chat_logprobs
from headrace_scheduling.requests import GenerateOptions, GenerationRequest, RequestShape

__all__ = ["routes"]

NUM_TOP = 20
# As many bits as every client's numbers hold exactly.
SEED_BITS = 32
MAX_FOREIGN_LETTERS = 0.02

_RESERVED_TOKEN = re.compile(r"<unused\d+>|<\|reserved_special_token_\d+\|>|\ufffd")

RequestT = TypeVar("RequestT", bound=SignalRequest)


def routes(services: ApiServices) -> Sequence[BaseRoute]:
    """Routes of a curve designer."""
    converter = make_curve_converter()

    async def read(http: Request, kind: type[RequestT]) -> tuple[RequestT, dict[str, str]]:
        body, _ = await read_body(http)
        request = structure(converter, body, kind)
        return request, ignored_header(body, kind, frozenset(), is_strict=services.strict)

    async def signal(http: Request) -> JSONResponse:
        request, headers = await read(http, SignalRequest)
        content = await run_until_disconnect(http.receive, _signal(services, request, tenant_of(http.scope, None)))
        return JSONResponse(content, headers=headers)

    async def generate(http: Request) -> JSONResponse:
        request, headers = await read(http, CurveRequest)
        content = await run_until_disconnect(http.receive, _generate(services, request, tenant_of(http.scope, None)))
        return JSONResponse(content, headers=headers)

    return [Route("/signal", signal, methods=["POST"]), Route("/generate", generate, methods=["POST"])]


# ---- /signal -------------------------------------------------------------------------------------------------


async def _signal(services: ApiServices, request: SignalRequest, tenant: str | None) -> dict[str, object]:
    # An end token is a candidate like any other: without `ignore_eos` nothing would tell of a step that chose one.
    options = GenerateOptions(
        max_tokens=1, ignore_eos=True, sampling=SamplingParams(logprobs=NUM_TOP, logprob_histogram=True)
    )
    async with services.models.lease(request.model) as served, AsyncExitStack() as resources:
        prompt = await _encode(served, request.prompt)
        (generation,) = await _run(served, resources, [prompt.request(options, tenant)])
        deltas = [delta async for delta in generation]
        captured = next(entry for delta in deltas for entry in delta.logprobs)
        histogram = captured.histogram
        assert histogram is not None, "the options ask for it"
        (top,) = chat_logprobs([captured], served.codec.token_bytes)
        return {
            "model": served.name,
            "num_prompt_tokens": len(prompt.ids),
            "num_bins": len(histogram.counts),
            "low": histogram.low,
            "high": 0.0,
            "counts": histogram.counts,
            "masses": histogram.masses,
            "below": {"count": histogram.num_below, "mass": histogram.mass_below},
            "top": top["top_logprobs"],
        }


# ---- /generate -----------------------------------------------------------------------------------------------


async def _generate(services: ApiServices, request: CurveRequest, tenant: str | None) -> dict[str, object]:
    seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed
    async with services.models.lease(request.model) as served, AsyncExitStack() as resources:
        prompt = await _encode(served, request.prompt)
        recipe = None if request.tone is not None else asdict(served.sampling_defaults)
        sampling: Mapping[str, Any] = {"curve": request.tone} if recipe is None else recipe
        seeds = [(seed + index) % 2**64 for index in range(request.n)]
        generations = await _run(
            served, resources, [prompt.request(_options(request, sampling, one), tenant) for one in seeds]
        )
        samples = [
            await _sample(generation, request.prompt, one) for generation, one in zip(generations, seeds, strict=True)
        ]
        ends = [generation.finished_choices[0].stats for generation in generations]
        num_generated = sum(end.num_generated_tokens for end in ends)
        return {
            "model": served.name,
            "mode": "curve" if recipe is None else "default",
            "recipe": recipe,
            "n": request.n,
            "seed": seed,
            "samples": samples,
            "usage": {
                "prompt_tokens": len(prompt.ids),
                "completion_tokens": num_generated,
                "total_tokens": len(prompt.ids) + num_generated,
            },
        }


def _options(request: CurveRequest, sampling: Mapping[str, Any], seed: int) -> GenerateOptions:
    return GenerateOptions(max_tokens=request.max_tokens, sampling=SamplingParams(seed=seed, **sampling))


async def _sample(generation: Generation, prompt: str, seed: int) -> dict[str, object]:
    text = "".join([delta.text async for delta in generation])
    reason = generation.finished_choices[0].reason
    return {"text": text, "junk": is_junk(text, prompt), "seed": seed, "finish_reason": reason}


def is_junk(text: str, prompt: str) -> bool:
    """Whether a sample looks like the tail of the vocabulary.

    It does if it holds a replacement character or a token that its vocabulary reserves, or if at least 2 % of its
    letters are of scripts that are neither the prompt's nor Latin.
    """
    if _RESERVED_TOKEN.search(text):
        return True
    scripts = _scripts(text)
    known = {"LATIN", *_scripts(prompt)}
    num_foreign = sum(script not in known for script in scripts)
    return num_foreign > 0 and num_foreign / len(scripts) >= MAX_FOREIGN_LETTERS


def _scripts(text: str) -> list[str]:
    # The first word of a letter's name; Chinese, Japanese and Korean texts mix theirs.
    words = [unicodedata.name(char, "UNNAMED").partition(" ")[0] for char in text if char.isalpha()]
    return ["CJK" if word in {"HIRAGANA", "KATAKANA", "HANGUL"} else word for word in words]


# ---- both ----------------------------------------------------------------------------------------------------


@frozen
class _Prompt:
    ids: tuple[int, ...]
    stable_boundary: int | None

    def request(self, options: GenerateOptions, tenant: str | None) -> GenerationRequest:
        return GenerationRequest(
            prompt_ids=self.ids, options=options, stable_boundary=self.stable_boundary, tenant=tenant
        )


async def _encode(served: ServedModel, prompt: str) -> _Prompt:
    """Encode a prompt as the one turn of a chat, or as it is if the model knows no chats."""
    check_num_chars(len(prompt), served.config.max_context)
    encoded = await asyncio.to_thread(_encode_now, served, prompt)
    check_ids(encoded.ids, served, "prompt")
    return encoded


def _encode_now(served: ServedModel, prompt: str) -> _Prompt:
    if not served.codec.has_chat_template:
        check_capability(served, "completions")
        return _Prompt(tuple(served.codec.encode(prompt)), None)
    check_capability(served, "chat")
    try:
        prepared = served.codec.prepare_chat([{"role": "user", "content": prompt}])
    except ValueError as exc:
        raise cannot_render(exc, "prompt") from None
    return _Prompt(tuple(prepared.ids), prepared.stable_boundary)


async def _run(
    served: ServedModel, resources: AsyncExitStack, requests: Sequence[GenerationRequest]
) -> list[Generation]:
    """Submit all; each shares the prompt that the first one computes."""
    placements = [served.gateway.place(RequestShape.of(one)) for one in requests]
    generations: list[Generation] = []
    for placement, one in zip(placements, requests, strict=True):
        generation = await served.gateway.run(placement, one)
        await resources.enter_async_context(aclosing(generation))
        generations.append(generation)
    return generations
