"""How a request runs, decided from the engine's constant facts and never from its load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_scheduling.errors import ContextOverBudget, RequestRefused
from headrace_scheduling.requests import ExecutionPlan, GenerationPlacement, RequestShape

if TYPE_CHECKING:
    from headrace_scheduling.messages import EngineInfo


def place(info: EngineInfo, shape: RequestShape) -> GenerationPlacement:
    """Place a request on a loaded engine.

    Raises:
        RequestRefused: the prompt is empty.
        ContextOverBudget: the prompt is at or above the context.
    """
    if shape.num_prompt_tokens < 1:
        raise RequestRefused(f"the prompt has {shape.num_prompt_tokens!r} tokens; it must have at least 1")
    remainder = info.max_context - shape.num_prompt_tokens
    if remainder < 1:
        raise ContextOverBudget(shape.num_prompt_tokens, info.max_context)
    is_serial = info.max_rows == 1
    return GenerationPlacement(
        shape=shape,
        mechanism="serial" if is_serial else "continuous",
        plan=ExecutionPlan(reasons=("max_rows_is_1",) if is_serial else ()),
        max_tokens=remainder if shape.max_tokens is None else min(shape.max_tokens, remainder),
    )
