"""Samplers for MLX language models: per-row parameters and randomness, vectorised over the batch.

Public modules: `params` (`SamplingParams`), `curves` (tone curves), `seeds` (seeds and step keys), `filters` (filters
over rows), `sampler` (`StepSampler`, one row), `batch` (`BatchSampler`, many rows), `logprobs`, `token_logprobs`
(`TokenLogprobs`, without MLX), `openai_view`
(OpenAI's shapes of log-probabilities), `mlx_lm_shapes` (mlx-lm's shapes of samplers and processors), `setup`
(`GrammarMask`), `bitmask` (masks of all rows in one operation), `grammar` (specification, check, compiler, controller;
needs the extra `grammar`), `acceptance` (`accept_drafts`), `errors`.
Importing this root imports no mlx.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_sampling.acceptance import AcceptedDrafts as AcceptedDrafts
    from headrace_sampling.acceptance import RowDraft as RowDraft
    from headrace_sampling.acceptance import accept_drafts as accept_drafts
    from headrace_sampling.batch import BatchSampler as BatchSampler
    from headrace_sampling.bitmask import GrammarState as GrammarState
    from headrace_sampling.bitmask import KnownBitmask as KnownBitmask
    from headrace_sampling.bitmask import TokenBitmask as TokenBitmask
    from headrace_sampling.chain import SampledStep as SampledStep
    from headrace_sampling.curves import HlgCurve as HlgCurve
    from headrace_sampling.curves import ToneCurve as ToneCurve
    from headrace_sampling.errors import BatchMismatch as BatchMismatch
    from headrace_sampling.errors import GrammarFailed as GrammarFailed
    from headrace_sampling.errors import GrammarUnavailable as GrammarUnavailable
    from headrace_sampling.errors import InvalidDrafts as InvalidDrafts
    from headrace_sampling.errors import InvalidGrammar as InvalidGrammar
    from headrace_sampling.errors import InvalidSamplingParams as InvalidSamplingParams
    from headrace_sampling.errors import SamplingError as SamplingError
    from headrace_sampling.errors import TokenNotAllowed as TokenNotAllowed
    from headrace_sampling.filters import drop_top_choices as drop_top_choices
    from headrace_sampling.filters import keep_min_p as keep_min_p
    from headrace_sampling.filters import keep_top_k as keep_top_k
    from headrace_sampling.filters import keep_top_n_sigma as keep_top_n_sigma
    from headrace_sampling.filters import keep_top_p as keep_top_p
    from headrace_sampling.filters import keep_typical as keep_typical
    from headrace_sampling.grammar.check import check_grammar as check_grammar
    from headrace_sampling.grammar.compiler import GrammarCompiler as GrammarCompiler
    from headrace_sampling.grammar.compiler import TokenizerFacts as TokenizerFacts
    from headrace_sampling.grammar.compiler import compile_grammar as compile_grammar
    from headrace_sampling.grammar.controller import GrammarController as GrammarController
    from headrace_sampling.grammar.controller import start_masks as start_masks
    from headrace_sampling.grammar.spec import GrammarSpec as GrammarSpec
    from headrace_sampling.grammar.spec import GrammarTag as GrammarTag
    from headrace_sampling.logprobs import StepLogprobs as StepLogprobs
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
    from headrace_sampling.token_logprobs import LogprobHistogram as LogprobHistogram
    from headrace_sampling.token_logprobs import TokenLogprobs as TokenLogprobs

__all__ = [
    "AcceptedDrafts",
    "BatchMismatch",
    "BatchSampler",
    "GrammarCompiler",
    "GrammarController",
    "GrammarFailed",
    "GrammarMask",
    "GrammarSpec",
    "GrammarState",
    "GrammarTag",
    "GrammarUnavailable",
    "HlgCurve",
    "InvalidDrafts",
    "InvalidGrammar",
    "InvalidSamplingParams",
    "KnownBitmask",
    "LogprobHistogram",
    "RowDraft",
    "RowSampling",
    "SampledStep",
    "SamplingError",
    "SamplingParams",
    "StepLogprobs",
    "StepSampler",
    "TokenBitmask",
    "TokenLogprobs",
    "TokenNotAllowed",
    "TokenizerFacts",
    "ToneCurve",
    "accept_drafts",
    "chat_logprobs",
    "check_grammar",
    "compile_grammar",
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
    "start_masks",
    "step_key",
]

_MODULES = {
    "AcceptedDrafts": "acceptance",
    "BatchMismatch": "errors",
    "BatchSampler": "batch",
    "GrammarCompiler": "grammar.compiler",
    "GrammarController": "grammar.controller",
    "GrammarFailed": "errors",
    "GrammarMask": "setup",
    "GrammarSpec": "grammar.spec",
    "GrammarState": "bitmask",
    "GrammarTag": "grammar.spec",
    "GrammarUnavailable": "errors",
    "HlgCurve": "curves",
    "InvalidDrafts": "errors",
    "InvalidGrammar": "errors",
    "InvalidSamplingParams": "errors",
    "KnownBitmask": "bitmask",
    "LogprobHistogram": "token_logprobs",
    "RowDraft": "acceptance",
    "RowSampling": "sampler",
    "SampledStep": "chain",
    "SamplingError": "errors",
    "SamplingParams": "params",
    "StepLogprobs": "logprobs",
    "StepSampler": "sampler",
    "TokenBitmask": "bitmask",
    "TokenLogprobs": "token_logprobs",
    "TokenNotAllowed": "errors",
    "TokenizerFacts": "grammar.compiler",
    "ToneCurve": "curves",
    "accept_drafts": "acceptance",
    "chat_logprobs": "openai_view",
    "check_grammar": "grammar.check",
    "compile_grammar": "grammar.compiler",
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
    "start_masks": "grammar.controller",
    "step_key": "seeds",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
