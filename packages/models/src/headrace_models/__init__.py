"""Language models on MLX: architectures, weights, tokenizer codec and model sources.

Public modules: `sources` (names to files), `index_models` and `hub` (fetching), `config` (what a model is), `codec`
(text, tokens and chat prompts), `template` and `meter` (what templates may spend), `tokenizer_files`, `gguf_file`,
`loading` and `exporting` (weights), `device` (BLAS and measurements) and `errors`. Importing this package imports no
MLX.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_models.codec import Codec as Codec
    from headrace_models.codec import PreparedPrompt as PreparedPrompt
    from headrace_models.codec import load_codec as load_codec
    from headrace_models.config import GenerationDefaults as GenerationDefaults
    from headrace_models.config import ModelConfig as ModelConfig
    from headrace_models.config import Quantization as Quantization
    from headrace_models.config import read_config as read_config
    from headrace_models.converting import convert as convert
    from headrace_models.device import BlasReport as BlasReport
    from headrace_models.device import enable_fast_blas as enable_fast_blas
    from headrace_models.device import interleave_streams as interleave_streams
    from headrace_models.device import map_large_blocks as map_large_blocks
    from headrace_models.device import measure as measure
    from headrace_models.device import profile as profile
    from headrace_models.device import share_blas as share_blas
    from headrace_models.errors import ChecksumMismatch as ChecksumMismatch
    from headrace_models.errors import DownloadError as DownloadError
    from headrace_models.errors import ModelError as ModelError
    from headrace_models.errors import SourceError as SourceError
    from headrace_models.errors import TemplateError as TemplateError
    from headrace_models.errors import UnsupportedArchitecture as UnsupportedArchitecture
    from headrace_models.errors import UnsupportedFormat as UnsupportedFormat
    from headrace_models.errors import WeightMismatch as WeightMismatch
    from headrace_models.exporting import export as export
    from headrace_models.fitting import FitReport as FitReport
    from headrace_models.fitting import fit as fit
    from headrace_models.fitting import fit_source as fit_source
    from headrace_models.headers import read_headers as read_headers
    from headrace_models.index_models import DEFAULT_MODEL as DEFAULT_MODEL
    from headrace_models.index_models import INDEX_MODELS as INDEX_MODELS
    from headrace_models.index_models import IndexModel as IndexModel
    from headrace_models.loading import LoadedModel as LoadedModel
    from headrace_models.loading import load as load
    from headrace_models.meter import RenderLimits as RenderLimits
    from headrace_models.packing_plan import BitsRule as BitsRule
    from headrace_models.packing_plan import read_bits_file as read_bits_file
    from headrace_models.sources import ModelSource as ModelSource
    from headrace_models.sources import resolve as resolve
    from headrace_models.template import ChatTemplate as ChatTemplate

__all__ = [
    "BitsRule",
    "BlasReport",
    "ChatTemplate",
    "ChecksumMismatch",
    "Codec",
    "DEFAULT_MODEL",
    "DownloadError",
    "FitReport",
    "GenerationDefaults",
    "INDEX_MODELS",
    "IndexModel",
    "LoadedModel",
    "ModelConfig",
    "ModelError",
    "ModelSource",
    "PreparedPrompt",
    "Quantization",
    "RenderLimits",
    "SourceError",
    "TemplateError",
    "UnsupportedArchitecture",
    "UnsupportedFormat",
    "WeightMismatch",
    "convert",
    "enable_fast_blas",
    "export",
    "fit",
    "fit_source",
    "interleave_streams",
    "load",
    "load_codec",
    "map_large_blocks",
    "measure",
    "profile",
    "read_bits_file",
    "read_config",
    "read_headers",
    "resolve",
    "share_blas",
]

_MODULES = {
    "BitsRule": "packing_plan",
    "BlasReport": "device",
    "ChatTemplate": "template",
    "ChecksumMismatch": "errors",
    "Codec": "codec",
    "DEFAULT_MODEL": "index_models",
    "DownloadError": "errors",
    "FitReport": "fitting",
    "GenerationDefaults": "config",
    "INDEX_MODELS": "index_models",
    "IndexModel": "index_models",
    "LoadedModel": "loading",
    "ModelConfig": "config",
    "ModelError": "errors",
    "ModelSource": "sources",
    "PreparedPrompt": "codec",
    "Quantization": "config",
    "RenderLimits": "meter",
    "SourceError": "errors",
    "TemplateError": "errors",
    "UnsupportedArchitecture": "errors",
    "UnsupportedFormat": "errors",
    "WeightMismatch": "errors",
    "convert": "converting",
    "enable_fast_blas": "device",
    "export": "exporting",
    "fit": "fitting",
    "fit_source": "fitting",
    "interleave_streams": "device",
    "load": "loading",
    "load_codec": "codec",
    "map_large_blocks": "device",
    "measure": "device",
    "profile": "device",
    "read_bits_file": "packing_plan",
    "read_config": "config",
    "read_headers": "headers",
    "resolve": "sources",
    "share_blas": "device",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
