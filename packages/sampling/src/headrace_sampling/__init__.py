"""Samplers for MLX language models: per-row parameters and randomness, vectorised over the batch.

Public modules: `params` (`SamplingParams`), `curves` (tone curves), `seeds` (seeds and step keys), `filters` (filters
over rows), `sampler` (`StepSampler`, one row), `batch` (`BatchSampler`, many rows), `logprobs`, `openai_view`
(OpenAI's shapes of log-probabilities), `mlx_lm_shapes` (mlx-lm's shapes of samplers and processors), `setup`
(`GrammarMask`), `errors`.
Importing this root imports no mlx.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_sampling.batch import BatchSampler as BatchSampler
    from headrace_sampling.chain import SampledStep as SampledStep
    from headrace_sampling.curves import HlgCurve as HlgCurve
    from headrace_sampling.curves import ToneCurve as ToneCurve
    from headrace_sampling.errors import BatchMismatch as BatchMismatch
    from headrace_sampling.errors import InvalidSamplingParams as InvalidSamplingParams
    from headrace_sampling.errors import SamplingError as SamplingError
    from headrace_sampling.filters import drop_top_choices as drop_top_choices
    from headrace_sampling.filters import keep_min_p as keep_min_p
    from headrace_sampling.filters import keep_top_k as keep_top_k
    from headrace_sampling.filters import keep_top_n_sigma as keep_top_n_sigma
    from headrace_sampling.filters import keep_top_p as keep_top_p
    from headrace_sampling.filters import keep_typical as keep_typical
    from headrace_sampling.logprobs import StepLogprobs as StepLogprobs
    from headrace_sampling.logprobs import TokenLogprobs as TokenLogprobs
    from headrace_sampling.logprobs import score_tokens as score_tokens
    from headrace_sampling.mlx_lm_shapes import make_logits_processors as make_logits_processors
    from headrace_sampling.mlx_lm_shapes import make_sampler as make_sampler
    from headrace_sampling.openai_view import chat_logprobs as chat_logprobs
    from headrace_sampling.openai_view import completion_logprobs as completion_logprobs
    from headrace_sampling.params import SamplingParams as SamplingParams
    from headrace_sampling.sampler import RowSampling as RowSampling
    from headrace_sampling.sampler import StepSampler as StepSampler
    from headrace_sampling.sampler import create_row_sampling as create_row_sampling
    from headrace_sampling.sampler import make_step_sampler as make_step_sampler
    from headrace_sampling.seeds import default_seed as default_seed
    from headrace_sampling.seeds import mix_seed as mix_seed
    from headrace_sampling.seeds import step_key as step_key
    from headrace_sampling.setup import GrammarMask as GrammarMask

__all__ = [
    "BatchMismatch",
    "BatchSampler",
    "GrammarMask",
    "HlgCurve",
    "InvalidSamplingParams",
    "RowSampling",
    "SampledStep",
    "SamplingError",
    "SamplingParams",
    "StepLogprobs",
    "StepSampler",
    "TokenLogprobs",
    "ToneCurve",
    "chat_logprobs",
    "completion_logprobs",
    "create_row_sampling",
    "default_seed",
    "drop_top_choices",
    "keep_min_p",
    "keep_top_k",
    "keep_top_n_sigma",
    "keep_top_p",
    "keep_typical",
    "make_logits_processors",
    "make_sampler",
    "make_step_sampler",
    "mix_seed",
    "score_tokens",
    "step_key",
]

_MODULES = {
    "BatchMismatch": "errors",
    "BatchSampler": "batch",
    "GrammarMask": "setup",
    "HlgCurve": "curves",
    "InvalidSamplingParams": "errors",
    "RowSampling": "sampler",
    "SampledStep": "chain",
    "SamplingError": "errors",
    "SamplingParams": "params",
    "StepLogprobs": "logprobs",
    "StepSampler": "sampler",
    "TokenLogprobs": "logprobs",
    "ToneCurve": "curves",
    "chat_logprobs": "openai_view",
    "completion_logprobs": "openai_view",
    "create_row_sampling": "sampler",
    "default_seed": "seeds",
    "drop_top_choices": "filters",
    "keep_min_p": "filters",
    "keep_top_k": "filters",
    "keep_top_n_sigma": "filters",
    "keep_top_p": "filters",
    "keep_typical": "filters",
    "make_logits_processors": "mlx_lm_shapes",
    "make_sampler": "mlx_lm_shapes",
    "make_step_sampler": "sampler",
    "mix_seed": "seeds",
    "score_tokens": "logprobs",
    "step_key": "seeds",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
