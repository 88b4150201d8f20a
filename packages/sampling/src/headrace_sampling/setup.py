"""What one row brings to a step beside its logits: parameters, history and mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from headrace_sampling.errors import InvalidSamplingParams
from headrace_sampling.validation import MAX_TOKEN_ID

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from headrace_sampling.history import RowHistory
    from headrace_sampling.params import SamplingParams


class GrammarMask(Protocol):
    """Closes tokens that a grammar does not allow; whoever drives the grammar advances it between steps.

    A `TokenBitmask`, as every `GrammarController` is, fits; rows with one are masked in a single operation.
    """

    def apply_mask(self, logits: mx.array) -> mx.array:
        """Return `logits (1, V) float32` with closed tokens at minus infinity, lazily; at least one stays open."""
        ...


@frozen(kw_only=True, eq=False)
class RowSetup:
    """One row's part in a step.

    Attributes:
        params: how to sample.
        eos_token_ids: tokens that end the row: closed below `min_tokens`, never excluded by XTC.
        mask: applied after the processors, so that nothing opens again what it closed.
        history: None if no parameter needs one.
        records_history: whether a sampled token enters the history by itself.
    """

    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    mask: GrammarMask | None = None
    history: RowHistory | None = None
    records_history: bool = True


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise `InvalidSamplingParams` for a logit bias outside the vocabulary."""
    if params.logit_bias and params.logit_bias[-1][0] >= vocab_size:
        token_id = params.logit_bias[-1][0]
        raise InvalidSamplingParams("logit_bias", token_id, f"keyed by token ids from 0 to {vocab_size - 1}")


def check_history(token_ids: Sequence[int]) -> Sequence[int]:
    """Return the ids, or raise `InvalidSamplingParams` for one that is none."""
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            raise InvalidSamplingParams("initial_history", token_id, "token ids, integers from 0")
    return token_ids
