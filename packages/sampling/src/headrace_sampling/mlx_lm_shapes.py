"""Samplers and logits processors in the shapes that mlx-lm's generation functions take."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx

from headrace_sampling import penalties
from headrace_sampling.chain import SamplingChain
from headrace_sampling.errors import InvalidSamplingParams
from headrace_sampling.history import HistoryNeeds
from headrace_sampling.params import SamplingParams
from headrace_sampling.seeds import default_seed, mix_seed, step_key
from headrace_sampling.setup import RowSetup, check_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Sampler: TypeAlias = "Callable[[mx.array], mx.array]"
LogitsProcessor: TypeAlias = "Callable[[mx.array, mx.array], mx.array]"
Penalise: TypeAlias = "Callable[[mx.array, mx.array, mx.array], mx.array]"


def make_sampler(
    params: SamplingParams | None = None,
    /,
    *,
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Iterable[int] | None = None,
) -> Sampler:
    """Make a sampler of mlx-lm's shape: a function from log-probabilities `(B, V)` to tokens `(B,) int32`.

    Each call is one step. Row i draws from `mix_seed(seed, i)`, so row 0 equals a `StepSampler` with the same seed.
    It sees no history: give penalties to mlx-lm as logits processors.

    Args:
        params: the parameters; mlx-lm's keywords below are for calls without them.
        temp: temperature; 0 is greedy.
        top_p: nucleus share; 0 and 1 are off.
        min_p: least probability relative to the best token; 0 is off.
        min_tokens_to_keep: how many of the best tokens min-p never drops.
        top_k: number of best tokens kept; 0 is off.
        xtc_probability: how often a row's step excludes the top choices; 0 is off.
        xtc_threshold: see `SamplingParams`.
        xtc_special_tokens: ids that XTC never excludes.

    Raises:
        InvalidSamplingParams: a value outside its range, both ways of giving parameters at once, or parameters that
            need a history.
    """
    keywords = SamplingParams(
        temperature=temp,
        top_p=top_p,
        min_p=min_p,
        min_tokens_to_keep=min_tokens_to_keep,
        top_k=top_k,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
        xtc_exempt=tuple(xtc_special_tokens or ()),
    )
    if params is None:
        return _CountingSampler(keywords)
    if keywords != SamplingParams(top_p=0.0):
        raise InvalidSamplingParams("params", params, "given alone, without mlx-lm's keywords")
    return _CountingSampler(params)


class _CountingSampler:
    """Draws in its own sequence of steps, without processors."""

    def __init__(self, params: SamplingParams) -> None:
        if not HistoryNeeds.of(params).is_empty:
            raise InvalidSamplingParams("params", params, "free of penalties; mlx-lm takes them as logits processors")
        self._setup = RowSetup(params=params)
        self._seed = default_seed() if params.seed is None else params.seed
        self._step = 0
        self._chain: tuple[tuple[int, ...], SamplingChain] | None = None

    def __call__(self, logprobs: mx.array) -> mx.array:
        num_rows, vocab_size = logprobs.shape
        if self._chain is None or self._chain[0] != (num_rows, vocab_size):
            self._chain = (num_rows, vocab_size), SamplingChain((self._setup,) * num_rows, vocab_size)
        keys = [step_key(mix_seed(self._seed, row), self._step) for row in range(num_rows)]
        sampled = self._chain[1].pick(logprobs, keys, [self._step] * num_rows)
        self._step += 1
        return sampled.tokens


def make_logits_processors(
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int = 20,
    presence_penalty: float | None = None,
    presence_context_size: int = 20,
    frequency_penalty: float | None = None,
    frequency_context_size: int = 20,
) -> list[LogitsProcessor]:
    """Make logits processors of mlx-lm's shape: functions from token ids `(T,)` and logits `(1, V)` to logits.

    As in mlx-lm, all penalties count the tokens given, prompt included, and a context size of 0 is the whole of them.
    Unlike there, a bias outside the vocabulary is an error, and the logits given are left as they are.

    Args:
        logit_bias: added to the logits, by token id.
        repetition_penalty: divides seen positive logits and multiplies negative ones; None and 0 are off.
        repetition_context_size: how many last tokens count.
        presence_penalty: subtracted once per seen token; None and 0 are off.
        presence_context_size: how many last tokens count.
        frequency_penalty: subtracted per occurrence; None and 0 are off.
        frequency_context_size: how many last tokens count.

    Raises:
        InvalidSamplingParams: a value outside its range; a bias outside the vocabulary, at the first call.
    """
    params = SamplingParams(
        logit_bias=logit_bias or {},
        repetition_penalty=repetition_penalty or 0.0,
        repetition_window=repetition_context_size,
        presence_penalty=presence_penalty or 0.0,
        presence_window=presence_context_size,
        frequency_penalty=frequency_penalty or 0.0,
        frequency_window=frequency_context_size,
    )
    processors: list[LogitsProcessor] = []
    if params.logit_bias:
        processors.append(partial(_add_bias, params))
    penalised: Sequence[tuple[Penalise, float, int]] = (
        (penalties.penalise_repeated, params.repetition_penalty, params.repetition_window),
        (penalties.penalise_present, params.presence_penalty, params.presence_window),
        (penalties.penalise_frequent, params.frequency_penalty, params.frequency_window),
    )
    processors.extend(
        partial(_penalise_last, penalise, mx.array([[amount]], mx.float32), window)
        for penalise, amount, window in penalised
        if amount
    )
    return processors


def _add_bias(params: SamplingParams, _tokens: mx.array, logits: mx.array) -> mx.array:
    check_vocabulary(params, logits.shape[-1])
    token_ids, values = zip(*params.logit_bias, strict=True)
    return logits.at[:, mx.array(token_ids, mx.int32)].add(mx.array(values, logits.dtype))


def _penalise_last(
    penalise: Penalise, amount: mx.array, window: int, tokens: mx.array | Sequence[int], logits: mx.array
) -> mx.array:
    seen = (
        (tokens if isinstance(tokens, mx.array) else mx.array(list(tokens)))
        .astype(mx.int32)
        .reshape(1, -1)[:, -window:]
    )
    if not seen.size:
        return logits
    return penalise(logits.astype(mx.float32), seen, amount).astype(logits.dtype)
