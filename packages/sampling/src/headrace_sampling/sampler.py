"""One row's sampler and its place in the row's own sequence of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from attrs import define, field

from headrace_sampling.chain import SamplingChain, check_vocabulary
from headrace_sampling.errors import InvalidSamplingParams
from headrace_sampling.params import SamplingParams
from headrace_sampling.seeds import default_seed, mix_seed, step_key

if TYPE_CHECKING:
    import mlx.core as mx

TokenSink: TypeAlias = Callable[[int, None], bool | None]
"""Called with each emitted token and its log-probabilities (none are captured yet); only False itself stops the row."""


class StepSampler:
    """Samples one row. Its randomness at a step depends on its seed and that step alone.

    Attributes:
        params: the parameters that it was made with.
        seed: the seed in use, 64 bits: the parameters' own, or a fresh one if they have none.
        is_plain_greedy: whether a step is nothing but the argmax of the logits.
    """

    __slots__ = ("_chain", "is_plain_greedy", "params", "seed")

    def __init__(self, params: SamplingParams, seed: int) -> None:
        self.params = params
        self.seed = seed
        self.is_plain_greedy = params.is_greedy and not params.logit_bias
        self._chain: tuple[int, SamplingChain] | None = None

    def sample(self, logits: mx.array, step: int) -> mx.array:
        """Pick the token of one step, lazily.

        Args:
            logits: `(1, V)` floating point.
            step: the token's index in the row's generated sequence.

        Returns:
            `(1,) int32`.

        Raises:
            InvalidSamplingParams: a logit bias outside the vocabulary.
        """
        vocab_size = logits.shape[-1]
        if self._chain is None or self._chain[0] != vocab_size:
            self._chain = vocab_size, SamplingChain((self.params,), vocab_size)
        chain = self._chain[1]
        return chain.pick(logits, [step_key(self.seed, step) for _ in chain.drawing_rows])


def make_step_sampler(params: SamplingParams, *, vocab_size: int | None = None) -> StepSampler:
    """Make the sampler of one row; a None seed is replaced by a fresh one.

    Args:
        params: how to sample.
        vocab_size: V, to refuse a logit bias outside it at once instead of at the first step.

    Raises:
        InvalidSamplingParams: a logit bias outside the vocabulary.
    """
    if vocab_size is not None:
        check_vocabulary(params, vocab_size)
    return StepSampler(params, default_seed() if params.seed is None else params.seed)


@define(eq=False)
class RowSampling:
    """A row's sampler, the step that it samples next, and where its tokens go.

    Attributes:
        sampler: the row's sampler.
        step: index of the next sampled token in the row's generated sequence.
        on_token: sink of emitted tokens.
    """

    sampler: StepSampler
    step: int = 0
    on_token: TokenSink | None = field(default=None)

    def sample(self, logits: mx.array) -> mx.array:
        """Sample the next step from `logits (1, V)` and advance by one; returns `(1,) int32`."""
        token = self.sampler.sample(logits, self.step)
        self.step += 1
        return token

    def skip(self, num_tokens: int) -> None:
        """Advance past tokens that are known and not sampled, so that an explicit seed stays replayable."""
        self.step += num_tokens

    def emit(self, token_id: int) -> bool:
        """Hand a token to the sink, once per token and in order; returns False if the sink stops the row."""
        return self.on_token is None or self.on_token(token_id, None) is not False


def create_row_sampling(sampler: StepSampler, on_token: TokenSink | None = None, *, first_step: int = 0) -> RowSampling:
    """Start a row's sampling at `first_step`, the number of tokens that it has generated before."""
    return RowSampling(sampler, first_step, on_token)


def make_sampler(
    params: SamplingParams | None = None,
    /,
    *,
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    top_k: int = 0,
) -> Callable[[mx.array], mx.array]:
    """Make a sampler of mlx-lm's shape: a function from log-probabilities `(B, V)` to tokens `(B,) int32`.

    Each call is one step. Row i draws from `mix_seed(seed, i)`, so row 0 equals a `StepSampler` with the same seed.

    Args:
        params: the parameters; mlx-lm's keywords below are for calls without them.
        temp: temperature; 0 is greedy.
        top_p: nucleus share; 0 and 1 are off.
        min_p: least probability relative to the best token; 0 is off.
        top_k: number of best tokens kept; 0 is off.

    Raises:
        InvalidSamplingParams: a value outside its range, or both ways of giving parameters at once.
    """
    if params is None:
        params = SamplingParams(temperature=temp, top_p=top_p, min_p=min_p, top_k=top_k)
    elif (temp, top_p, min_p, top_k) != (0.0, 0.0, 0.0, 0):
        raise InvalidSamplingParams("params", params, "given alone, without mlx-lm's keywords")
    return _CountingSampler(make_step_sampler(params))


class _CountingSampler:
    def __init__(self, sampler: StepSampler) -> None:
        self._sampler = sampler
        self._step = 0
        self._chain: tuple[tuple[int, ...], SamplingChain] | None = None

    def __call__(self, logprobs: mx.array) -> mx.array:
        num_rows, vocab_size = logprobs.shape
        if self._chain is None or self._chain[0] != (num_rows, vocab_size):
            chain = SamplingChain((self._sampler.params,) * num_rows, vocab_size)
            self._chain = (num_rows, vocab_size), chain
        chain = self._chain[1]
        keys = [step_key(mix_seed(self._sampler.seed, row), self._step) for row in chain.drawing_rows]
        self._step += 1
        return chain.pick(logprobs, keys)
