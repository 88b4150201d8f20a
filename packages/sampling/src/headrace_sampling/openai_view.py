"""Log-probabilities in the shapes of the OpenAI API: plain data, ready for JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_sampling.token_logprobs import TokenLogprobs

IMPOSSIBLE = -9999.0
"""Stands for minus infinity, which JSON has no number for."""


class ChatToken(TypedDict):
    """One token of a chat reply. `id` is an addition that clients of mlx-lm read."""

    id: int
    token: str
    logprob: float
    bytes: list[int]


class ChatContent(ChatToken):
    """A picked token with the best candidates of its step."""

    top_logprobs: list[ChatToken]


class CompletionLogprobs(TypedDict):
    """Parallel lists over the tokens of a completion; the first token of an echoed prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def chat_logprobs(entries: Iterable[TokenLogprobs], token_bytes: Callable[[int], bytes]) -> list[ChatContent]:
    """Return the entries of `logprobs.content`.

    Args:
        entries: one per token.
        token_bytes: the bytes that a token stands for; a token may hold part of a character.
    """
    return [
        {
            **_chat_token(entry.token_id, entry.logprob, token_bytes),
            "top_logprobs": [_chat_token(token_id, logprob, token_bytes) for token_id, logprob in entry.top],
        }
        for entry in entries
    ]


def completion_logprobs(
    entries: Iterable[TokenLogprobs | None],
    token_ids: Iterable[int],
    token_bytes: Callable[[int], bytes],
    *,
    first_offset: int = 0,
) -> CompletionLogprobs:
    """Return the `logprobs` of a completion.

    Candidates whose text is equal share one key, with the best of their log-probabilities.

    Args:
        entries: one per token; None for a token that has none, as the first of an echoed prompt.
        token_ids: the tokens.
        token_bytes: the bytes that a token stands for.
        first_offset: code points before the first token, in streams.
    """
    view: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    offset = first_offset
    for entry, token_id in zip(entries, token_ids, strict=True):
        text = _text(token_bytes(token_id))
        view["tokens"].append(text)
        view["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
        view["top_logprobs"].append(_by_text(entry, token_bytes) if entry is not None and entry.top else None)
        view["text_offset"].append(offset)
        offset += len(text)
    return view


def _chat_token(token_id: int, logprob: float, token_bytes: Callable[[int], bytes]) -> ChatToken:
    raw = token_bytes(token_id)
    return {"id": token_id, "token": _text(raw), "logprob": _finite(logprob), "bytes": list(raw)}


def _by_text(entry: TokenLogprobs, token_bytes: Callable[[int], bytes]) -> dict[str, float]:
    texts: dict[str, float] = {}
    for token_id, logprob in entry.top:
        texts.setdefault(_text(token_bytes(token_id)), _finite(logprob))
    return texts


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else IMPOSSIBLE
