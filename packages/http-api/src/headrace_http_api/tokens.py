"""`/tokenize`, `/detokenize`, `/apply-template` and `/tokenizer_info`: what the model reads, nothing generated.

The bodies are vLLM's and llama.cpp's together.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from headrace_http_api.conversation_fields import cannot_render, check_template
from headrace_http_api.encoded import check_vocabulary
from headrace_http_api.errors import InvalidRequest
from headrace_http_api.opening import LONG_PROMPT_BYTES, check_num_chars
from headrace_http_api.ports import ServedModel
from headrace_http_api.request_body import ignored_header, read_body
from headrace_http_api.services import ApiServices
from headrace_http_api.token_requests import (
    TEMPLATE_UNSUPPORTED,
    TOKENIZE_UNSUPPORTED,
    ApplyTemplateRequest,
    DetokenizeRequest,
    TokenizeRequest,
    make_token_converter,
)
from headrace_http_api.unsupported import refuse_unsupported
from headrace_http_api.validation import structure

__all__ = ["routes"]

# Whoever counts a text wants to know by how much it is too long, not to have a library encoded: more characters or ids
# than these for each position of the context, or than these in all, are refused before they cost the loop their time.
MAX_CHARS_PER_POSITION = 16
MAX_CHARS = 2**22
MAX_IDS_PER_POSITION = 4

T = TypeVar("T")


def routes(services: ApiServices) -> Sequence[BaseRoute]:
    """Routes that show text as tokens, tokens as text, and conversations as prompts."""
    converter = make_token_converter()

    async def tokenize(http: Request) -> JSONResponse:
        body, num_bytes = await read_body(http)
        refuse_unsupported(body, TOKENIZE_UNSUPPORTED)
        request = structure(converter, body, TokenizeRequest)
        request.check()
        headers = ignored_header(body, TokenizeRequest, TOKENIZE_UNSUPPORTED.keys(), is_strict=services.strict)
        async with services.models.lease(request.model) as served:
            is_long = bool(request.messages) or num_bytes > LONG_PROMPT_BYTES
            answer = await _work(lambda: _tokenized(served, request), is_long=is_long)
        return JSONResponse(answer, headers=headers)

    async def detokenize(http: Request) -> JSONResponse:
        body, num_bytes = await read_body(http)
        request = structure(converter, body, DetokenizeRequest)
        headers = ignored_header(body, DetokenizeRequest, frozenset(), is_strict=services.strict)
        async with services.models.lease(request.model) as served:
            _check_length("tokens", len(request.tokens), MAX_IDS_PER_POSITION * served.config.max_context, "ids")
            check_vocabulary(request.tokens, served, "tokens")
            is_long = num_bytes > LONG_PROMPT_BYTES
            text = await _work(lambda: served.codec.decode(request.tokens, skip_special_tokens=False), is_long=is_long)
        return JSONResponse({"prompt": text, "content": text}, headers=headers)

    async def apply_template(http: Request) -> JSONResponse:
        body, _ = await read_body(http)
        refuse_unsupported(body, TEMPLATE_UNSUPPORTED)
        request = structure(converter, body, ApplyTemplateRequest)
        headers = ignored_header(body, ApplyTemplateRequest, TEMPLATE_UNSUPPORTED.keys(), is_strict=services.strict)
        async with services.models.lease(request.model) as served:
            text = await _work(lambda: _render(served, request), is_long=True)
        return JSONResponse({"prompt": text}, headers=headers)

    async def tokenizer_info(http: Request) -> JSONResponse:
        async with services.models.lease(http.query_params.get("model")) as served:
            return JSONResponse(_tokenizer_info(served))

    handlers = {"/tokenize": tokenize, "/detokenize": detokenize, "/apply-template": apply_template}
    return [
        *(Route(path, handler, methods=["POST"]) for path, handler in handlers.items()),
        Route("/tokenizer_info", tokenizer_info),
    ]


async def _work(work: Callable[[], T], *, is_long: bool) -> T:
    return await asyncio.to_thread(work) if is_long else work()


def _tokenized(served: ServedModel, request: TokenizeRequest) -> dict[str, object]:
    codec = served.codec
    text = _render(served, request) if request.messages else (request.content or request.prompt or "")
    limit = min(MAX_CHARS, MAX_CHARS_PER_POSITION * served.config.max_context)
    _check_length(request.text_param, len(text), limit, "characters")
    ids = codec.encode(text, add_special_tokens=request.adds_special_tokens)
    pieces = {token_id: codec.token_bytes(token_id) for token_id in ids if request.wants_pieces}
    return {
        "count": len(ids),
        "max_model_len": served.config.max_context,
        "tokens": [{"id": one, "piece": _piece(pieces[one])} for one in ids] if request.with_pieces else ids,
        "token_strs": [pieces[one].decode(errors="replace") for one in ids] if request.return_token_strs else None,
    }


def _check_length(param: str, length: int, limit: int, unit: str) -> None:
    if length > limit:
        raise InvalidRequest(
            f"{param} has {length} {unit}; at most {limit} are taken for this model's context here: send it in parts",
            param=param,
            code="context_length_exceeded",
        )


def _tokenizer_info(served: ServedModel) -> dict[str, object]:
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return {
        "model": served.name,
        "model_max_length": served.config.max_context,
        "vocab_size": served.config.vocab_size,
        **{name: served.codec.special_tokens.get(name) for name in names},
        "chat_template": served.codec.template_source(with_tools=False) or None,
    }


def _render(served: ServedModel, request: ApplyTemplateRequest) -> str:
    check_template(served)
    check_num_chars(request.num_message_chars, served.config.max_context)
    try:
        return served.codec.render_chat(**request.for_template())
    except ValueError as exc:
        raise cannot_render(exc) from None


def _piece(piece: bytes) -> str | list[int]:
    """Write a token's bytes as llama.cpp does: as text, or as numbers where they are part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
