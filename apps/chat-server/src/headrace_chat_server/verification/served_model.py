"""Checks of the served model itself: rows alone and in company, and its speed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from headrace_chat_server.verification.checks import Check, Measured
from headrace_chat_server.verification.rows import Rows

if TYPE_CHECKING:
    from headrace_models import LoadedModel

__all__ = ["greedy_check", "measure_speed"]

_PROMPTS = ("The capital of France is", "One, two, three, four, five, six, seven,", "Water boils when")
_NUM_TOKENS = 12
_NUM_PROMPT_TOKENS, _NUM_DECODED = 128, 8


def greedy_check(loaded: LoadedModel) -> Check:
    """Return the check that real prompts get the same greedy tokens alone and in one batch."""
    return Check(name="served model: greedy tokens in a batch equal those alone", measure=lambda: _greedy(loaded))


def measure_speed(loaded: LoadedModel) -> list[tuple[str, str]]:
    """Return prefill and decode speed of one row, for the report."""
    tokens = [index % loaded.config.vocab_size for index in range(5, 5 + _NUM_PROMPT_TOKENS)]
    Rows(loaded.model).join(tokens)
    start = time.perf_counter()
    rows = Rows(loaded.model)
    slot, logits = rows.join(tokens)
    prefilled = time.perf_counter()
    for _ in range(_NUM_DECODED):
        logits = rows.append((slot,), [[_best(logits)]])[0, -1]
    decoded = time.perf_counter()
    return [
        ("prefill", f"{_NUM_PROMPT_TOKENS / (prefilled - start):.0f} tokens/s, one row of {_NUM_PROMPT_TOKENS}"),
        ("decode", f"{_NUM_DECODED / (decoded - prefilled):.1f} tokens/s, one row"),
    ]


def _best(logits: mx.array) -> int:
    return cast("int", mx.argmax(logits, axis=-1).item())


def _alone(loaded: LoadedModel, prompt: list[int]) -> list[int]:
    rows = Rows(loaded.model)
    slot, logits = rows.join(prompt)
    tokens = [_best(logits)]
    while len(tokens) < _NUM_TOKENS:
        tokens.append(_best(rows.append((slot,), [[tokens[-1]]])[0, -1]))
    return tokens


def _together(loaded: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    rows = Rows(loaded.model, max_rows=len(prompts))
    joined = [rows.join(prompt) for prompt in prompts]
    found = [[_best(logits)] for _, logits in joined]
    slots = [slot for slot, _ in joined]
    while len(found[0]) < _NUM_TOKENS:
        logits = rows.append(slots, [tokens[-1:] for tokens in found])[:, -1]
        for tokens, row in zip(found, logits, strict=True):
            tokens.append(_best(row))
    return found


def _greedy(loaded: LoadedModel) -> Measured:
    prompts = [loaded.codec.encode(prompt) for prompt in _PROMPTS]
    alone = [_alone(loaded, prompt) for prompt in prompts]
    pairs = zip(alone, _together(loaded, prompts), strict=True)
    wrong = sum(left != right for one, two in pairs for left, right in zip(one, two, strict=True))
    num_tokens = len(prompts) * _NUM_TOKENS
    if "float32" in loaded.representation:
        return Measured(deviation=wrong, tolerance=0, detail=f"wrong tokens of {num_tokens}")
    # Rounding to 16 bits makes ties, which either side may win; the law of logits says whether it is only that.
    return Measured(deviation=wrong, tolerance=num_tokens, detail=f"other tokens of {num_tokens}; ties in 16 bits")
