"""What a generation yields: text deltas, then exactly one end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_sampling import TokenLogprobs

FinishReason = Literal["stop", "length"]
FailureCode = Literal["engine_failed", "request_failed", "context_over_budget", "queue_full", "deadline_exceeded"]


@frozen
class TextDelta:
    """Text that is final, and the ids of the tokens consumed since the last delta.

    Text may lag behind the tokens (a character or a possible stop string is held back), so either may be empty.

    Attributes:
        logprobs: one per token id if the request asked for log-probabilities, else empty.
        choice: which of the request's choices this belongs to.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice: int = 0

    @classmethod
    def joining(cls, deltas: Sequence[TextDelta]) -> TextDelta:
        """Join at least one delta of a choice, in their order."""
        first = deltas[0]
        if len(deltas) == 1:
            return first
        return cls(
            "".join(delta.text for delta in deltas),
            tuple(token_id for delta in deltas for token_id in delta.token_ids),
            tuple(entry for delta in deltas for entry in delta.logprobs),
            first.choice,
        )

    def joined(self, later: TextDelta | None) -> TextDelta:
        """Return this delta followed by a later one of the same choice."""
        if later is None:
            return self
        return TextDelta(
            self.text + later.text, self.token_ids + later.token_ids, self.logprobs + later.logprobs, self.choice
        )


@frozen(kw_only=True)
class GenerateStats:
    """Counts and clocks of one generation; times in seconds.

    Attributes:
        num_prompt_tokens: tokens of the prompt, cached ones included.
        num_cached_tokens: prompt tokens that were not computed because a stored prefix held them.
        num_generated_tokens: sampled tokens, a final EOS included.
        queue_s: submit to admission.
        prefill_s: admission to first token.
        decode_s: first token to end.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float

    @property
    def prefill_tps(self) -> float:
        """Computed prompt tokens per second; 0 when the time is 0."""
        return (self.num_prompt_tokens - self.num_cached_tokens) / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tps(self) -> float:
        """Tokens per second after the first; 0 when one token was generated or the time is 0."""
        if self.num_generated_tokens <= 1 or self.decode_s <= 0:
            return 0.0
        return (self.num_generated_tokens - 1) / self.decode_s


@frozen(kw_only=True)
class Finished:
    """A generation ended by itself.

    Attributes:
        stop_string: the stop string that matched, if one did.
        cumulative_logprob: sum over the sampled tokens, a final EOS included; None without log-probabilities.
    """

    reason: FinishReason
    stats: GenerateStats
    stop_string: str | None = None
    cumulative_logprob: float | None = None


@frozen(kw_only=True)
class Failed:
    """A generation ended by a fault. `message` holds no prompt or output text."""

    code: FailureCode
    message: str


@frozen
class Cancelled:
    """A generation was cancelled and its row is gone."""


RowEnd = Finished | Failed | Cancelled
