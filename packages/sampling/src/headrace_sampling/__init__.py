"""Samplers for MLX language models: per-row parameters and randomness, vectorised over the batch.

Public modules: `params` (`SamplingParams`), `seeds` (seeds and step keys), `filters` (top-p, min-p, top-k over rows),
`sampler` (`StepSampler`, one row; mlx-lm's sampler shape), `batch` (`BatchSampler`, many rows), `errors`.
Importing this root imports no mlx.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_sampling.batch import BatchSampler as BatchSampler
    from headrace_sampling.batch import SampledStep as SampledStep
    from headrace_sampling.curves import HlgCurve as HlgCurve
    from headrace_sampling.curves import ToneCurve as ToneCurve
    from headrace_sampling.errors import BatchMismatch as BatchMismatch
    from headrace_sampling.errors import InvalidSamplingParams as InvalidSamplingParams
    from headrace_sampling.errors import SamplingError as SamplingError
    from headrace_sampling.filters import keep_min_p as keep_min_p
    from headrace_sampling.filters import keep_top_k as keep_top_k
    from headrace_sampling.filters import keep_top_p as keep_top_p
    from headrace_sampling.params import SamplingParams as SamplingParams
    from headrace_sampling.sampler import RowSampling as RowSampling
    from headrace_sampling.sampler import StepSampler as StepSampler
    from headrace_sampling.sampler import create_row_sampling as create_row_sampling
    from headrace_sampling.sampler import make_sampler as make_sampler
    from headrace_sampling.sampler import make_step_sampler as make_step_sampler
    from headrace_sampling.seeds import default_seed as default_seed
    from headrace_sampling.seeds import mix_seed as mix_seed
    from headrace_sampling.seeds import step_key as step_key

__all__ = [
    "BatchMismatch",
    "BatchSampler",
    "HlgCurve",
    "InvalidSamplingParams",
    "RowSampling",
    "SampledStep",
    "SamplingError",
    "SamplingParams",
    "StepSampler",
    "ToneCurve",
    "create_row_sampling",
    "default_seed",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "make_sampler",
    "make_step_sampler",
    "mix_seed",
    "step_key",
]

_MODULES = {
    "BatchMismatch": "errors",
    "BatchSampler": "batch",
    "HlgCurve": "curves",
    "InvalidSamplingParams": "errors",
    "RowSampling": "sampler",
    "SampledStep": "batch",
    "SamplingError": "errors",
    "SamplingParams": "params",
    "StepSampler": "sampler",
    "ToneCurve": "curves",
    "create_row_sampling": "sampler",
    "default_seed": "seeds",
    "keep_min_p": "filters",
    "keep_top_k": "filters",
    "keep_top_p": "filters",
    "make_sampler": "sampler",
    "make_step_sampler": "sampler",
    "mix_seed": "seeds",
    "step_key": "seeds",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
