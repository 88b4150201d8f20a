"""How a request runs, decided from the engine's constant facts and never from its load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_scheduling.errors import ContextOverBudget, RequestRefused
from headrace_scheduling.requests import ExecutionPlan, GenerationPlacement, RequestShape

if TYPE_CHECKING:
    from headrace_scheduling.messages import EngineInfo


def place(info: EngineInfo, shape: RequestShape, *, issuer: object = None) -> GenerationPlacement:
    """Place a request on a loaded engine.

    Args:
        issuer: who will run it.

    Raises:
        RequestRefused: the prompt is empty.
        ContextOverBudget: the prompt is at or above the context.
    """
    if shape.num_prompt_tokens < 1:
        raise RequestRefused(f"the prompt has {shape.num_prompt_tokens!r} tokens; it must have at least 1")
    remainder = info.max_context - shape.num_prompt_tokens
    if remainder < 1:
        raise ContextOverBudget(shape.num_prompt_tokens, info.max_context)
    has_store = info.prompt_cache_bytes > 0 and shape.caches_prefix
    # The same prompt ids may stand for different media.
    is_identified = not (shape.has_vision or shape.has_adapters) or shape.has_prepared_prefix_identity
    reasons = info.serial_reasons if is_identified else (*info.serial_reasons, "media-without-identity")
    return GenerationPlacement(
        shape=shape,
        mechanism="serial" if info.serial_reasons else "continuous",
        plan=ExecutionPlan(prompt_cache=has_store and is_identified, reasons=reasons),
        max_tokens=remainder if shape.max_tokens is None else min(shape.max_tokens, remainder),
        issuer=issuer,
    )
