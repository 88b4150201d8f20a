"""What the serving process holds of a model: its codec, and the sampling defaults of its requests."""

from typing import TYPE_CHECKING

from attrs import asdict, frozen

from headrace_chat_server.settings import SamplingSettings
from headrace_http_api.ports import ChatCodec, SamplingDefaults

if TYPE_CHECKING:
    from headrace_models import GenerationDefaults, ModelSource


@frozen(kw_only=True)
class TextSide:
    """Codec and sampling defaults of one model."""

    codec: ChatCodec
    sampling_defaults: SamplingDefaults


def load_text_side(source: "ModelSource", sampling: SamplingSettings) -> TextSide:
    """Load the codec and merge the defaults; may take tenths of a second.

    Raises:
        ModelError: when a file is missing or cannot be used.
    """
    from headrace_models import load_codec, read_config
    from headrace_models.gguf_file import read_gguf

    gguf = read_gguf(source.path) if source.format == "gguf" else None
    config = read_config(source, gguf=gguf)
    codec = load_codec(source, gguf=gguf, eos_token_ids=config.eos_token_ids)
    return TextSide(codec=codec, sampling_defaults=merge_defaults(sampling, config.generation))


def merge_defaults(operator: SamplingSettings, model: "GenerationDefaults") -> SamplingDefaults:
    """Take each default from the operator, else from the model's authors, else from the built-ins."""
    merged = asdict(SamplingDefaults())
    for name in merged:
        for chosen in (getattr(operator, name), getattr(model, name)):
            if chosen is not None:
                merged[name] = chosen
                break
    return SamplingDefaults(**merged)
