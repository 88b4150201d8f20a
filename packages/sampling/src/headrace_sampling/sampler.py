"""One row's sampler and its place in the row's own sequence of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from attrs import define, field

from headrace_sampling.chain import SampledStep, SamplingChain
from headrace_sampling.history import HistoryNeeds, RowHistory
from headrace_sampling.processors import changes_logits
from headrace_sampling.seeds import default_seed, mix_seed, step_key
from headrace_sampling.setup import GrammarMask, RowSetup, check_history, check_vocabulary
from headrace_sampling.token_logprobs import TokenLogprobs

if TYPE_CHECKING:
    import mlx.core as mx

    from headrace_sampling.logprobs import StepLogprobs
    from headrace_sampling.params import SamplingParams

TokenSink: TypeAlias = Callable[[int, TokenLogprobs | None], bool | None]
"""Called with each emitted token and its log-probabilities if they were captured; only False itself stops the row."""


class StepSampler:
    """Samples one row. Its randomness at a step depends on its seed and that step alone.

    Made by `make_step_sampler`. Not thread-safe.

    Attributes:
        params: the parameters that it was made with.
        seed: the seed in use, 64 bits: the parameters' own or a fresh one, mixed with the choice.
        setup: what the row brings to a batch.
        is_plain_greedy: whether a step is nothing but the argmax of the logits.
    """

    __slots__ = ("_chain", "is_plain_greedy", "params", "seed", "setup")

    def __init__(self, setup: RowSetup, seed: int) -> None:
        self.params = setup.params
        self.seed = seed
        self.setup = setup
        is_bare = not changes_logits(setup) and not self.captures_logprobs
        self.is_plain_greedy = setup.params.is_greedy and is_bare
        self._chain: tuple[int, SamplingChain] | None = None

    @property
    def captures_logprobs(self) -> bool:
        """Whether steps carry log-probabilities."""
        return self.params.logprobs is not None

    def sample(self, logits: mx.array, step: int) -> mx.array:
        """Pick the token of one step, lazily: `sample_step` without the log-probabilities.

        Args:
            logits: `(1, V)` floating point.
            step: the token's index in the row's generated sequence.

        Returns:
            `(1,) int32`.

        Raises:
            InvalidSamplingParams: a logit bias outside the vocabulary.
        """
        return self.sample_step(logits, step).tokens

    def sample_step(self, logits: mx.array, step: int) -> SampledStep:
        """Pick the token of one step, lazily, and record it in the history unless that is manual.

        Args:
            logits: `(1, V)` floating point.
            step: the token's index in the row's generated sequence.

        Raises:
            InvalidSamplingParams: a logit bias outside the vocabulary.
        """
        vocab_size = logits.shape[-1]
        if self._chain is None or self._chain[0] != vocab_size:
            self._chain = vocab_size, SamplingChain((self.setup,), vocab_size)
        return self._chain[1].pick(logits, (step_key(self.seed, step),), (step,))

    def record(self, token_ids: Iterable[int] | mx.array) -> None:
        """Add tokens of the reply to the history: known ones, or accepted ones of a manual history.

        Args:
            token_ids: in order; an array is not read.
        """
        if self.setup.history is not None:
            self.setup.history.append(token_ids)


def make_step_sampler(
    params: SamplingParams,
    *,
    vocab_size: int | None = None,
    choice: int = 0,
    initial_history: Sequence[int] = (),
    eos_token_ids: Iterable[int] = (),
    mask: GrammarMask | None = None,
    records_history: bool = True,
) -> StepSampler:
    """Make the sampler of one row; a None seed is replaced by a fresh one.

    Args:
        params: how to sample.
        vocab_size: V, to refuse a logit bias outside it at once instead of at the first step.
        choice: which of a request's choices the row is; choice 0 draws from the seed itself.
        initial_history: token ids of the prompt. Kept only as far as a parameter needs them.
        eos_token_ids: closed below `min_tokens`, never excluded by XTC.
        mask: closes tokens after the processors.
        records_history: False for a manual history: only `record` adds to it, so that rejected drafts never enter.

    Raises:
        InvalidSamplingParams: a logit bias outside the vocabulary, or a history that is not token ids.
    """
    if vocab_size is not None:
        check_vocabulary(params, vocab_size)
    needs = HistoryNeeds.of(params)
    history = None if needs.is_empty else RowHistory(needs, check_history(initial_history))
    setup = RowSetup(
        params=params,
        eos_token_ids=tuple(sorted(set(eos_token_ids))),
        mask=mask,
        history=history,
        records_history=records_history,
    )
    return StepSampler(setup, mix_seed(default_seed() if params.seed is None else params.seed, choice))


@define(eq=False)
class RowSampling:
    """A row's sampler, the step that it samples next, and where its tokens go.

    Log-probabilities are kept by step from sampling to emission: a pipelined row samples token n + 1 before it emits
    n. They go with the row when it is dropped.

    Attributes:
        sampler: the row's sampler.
        step: index of the next sampled token in the row's generated sequence.
        on_token: sink of emitted tokens.
        num_emitted: index of the next emitted token.
    """

    sampler: StepSampler
    step: int = 0
    on_token: TokenSink | None = field(default=None)
    num_emitted: int = 0
    _captured: dict[int, tuple[StepLogprobs, int]] = field(factory=dict, init=False)

    def sample(self, logits: mx.array) -> mx.array:
        """Sample the next step from `logits (1, V)` and advance by one; returns `(1,) int32`."""
        sampled = self.sampler.sample_step(logits, self.step)
        self.advance(sampled.logprobs, 0)
        return sampled.tokens

    def advance(self, logprobs: StepLogprobs | None, row: int) -> None:
        """Go on to the next step after this one was sampled in row `row` of a batch."""
        if logprobs is not None and self.sampler.captures_logprobs:
            self._captured[self.step] = logprobs, row
        self.step += 1

    def skip(self, num_tokens: int) -> None:
        """Advance past tokens that are known and not sampled, so that an explicit seed stays replayable."""
        self.step += num_tokens

    def fill(self, token_ids: Sequence[int]) -> None:
        """Take known tokens into the row: they enter its history and advance its step, and have no log-probability."""
        self.sampler.record(token_ids)
        self.skip(len(token_ids))

    def emit(self, token_id: int) -> bool:
        """Hand a token to the sink, once per token and in order; returns False if the sink stops the row."""
        captured = self._captured.pop(self.num_emitted, None)
        self.num_emitted += 1
        if self.on_token is None:
            return True
        logprobs = None if captured is None else captured[0].row(captured[1])
        return self.on_token(token_id, logprobs) is not False


def create_row_sampling(sampler: StepSampler, on_token: TokenSink | None = None, *, first_step: int = 0) -> RowSampling:
    """Start a row's sampling at `first_step`, the number of tokens that it has generated before."""
    return RowSampling(sampler, first_step, on_token, first_step)
