"""Laws of sampling: (seed, step) decides the token, in any batch, and all rows at once equal each by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import mlx.core as mx

from headrace_chat_server.verification.checks import Check, Measured
from headrace_sampling import BatchSampler, SamplingParams, create_row_sampling, make_step_sampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_sampling import RowSampling

__all__ = ["sampling_laws"]

_VOCAB_SIZE, _NUM_STEPS = 1_000, 8
_PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.0, top_p=0.9, seed=2),
    SamplingParams(temperature=1.2, top_k=20, min_p=0.02, seed=3),
)


def sampling_laws() -> list[Check]:
    """Return the laws; they need no model."""
    return [
        Check(name="sampling: seed and step decide the token", measure=_reproducible),
        Check(name="sampling: rows together equal rows alone", measure=_vectorised),
    ]


def _rows(params: Sequence[SamplingParams]) -> list[RowSampling]:
    return [create_row_sampling(make_step_sampler(each, vocab_size=_VOCAB_SIZE)) for each in params]


def _logits(step: int) -> mx.array:
    row = mx.random.normal((1, _VOCAB_SIZE), key=mx.random.key(step)) * 3
    return mx.repeat(row, len(_PARAMS), axis=0)


def _drawn(params: Sequence[SamplingParams]) -> list[list[int]]:
    sampler, rows = BatchSampler(), _rows(params)
    return [
        cast("list[int]", sampler.sample(_logits(step)[: len(params)], rows).tokens.tolist())
        for step in range(_NUM_STEPS)
    ]


def _reproducible() -> Measured:
    """Draw twice, the second time in the reverse order of rows."""
    first, second = _drawn(_PARAMS), _drawn(_PARAMS[::-1])
    wrong = sum(
        left != right
        for one, two in zip(first, second, strict=True)
        for left, right in zip(one, two[::-1], strict=True)
    )
    return Measured(deviation=wrong, tolerance=0, detail=f"wrong tokens of {_NUM_STEPS * len(_PARAMS)}")


def _vectorised() -> Measured:
    together = _drawn(_PARAMS)
    wrong = 0
    for index, params in enumerate(_PARAMS):
        alone = make_step_sampler(params, vocab_size=_VOCAB_SIZE)
        for step in range(_NUM_STEPS):
            wrong += together[step][index] != alone.sample(_logits(step)[:1], step).item()
    return Measured(deviation=wrong, tolerance=0, detail=f"wrong tokens of {_NUM_STEPS * len(_PARAMS)}")
