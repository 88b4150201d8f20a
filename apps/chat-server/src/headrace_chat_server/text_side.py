"""What the serving process holds of a model: its codec, and the sampling defaults of its requests."""

from pathlib import Path
from typing import TYPE_CHECKING

from attrs import asdict, frozen

from headrace_chat_server.errors import ModelUnavailable
from headrace_chat_server.settings import SamplingSettings
from headrace_http_api.ports import ChatCodec, SamplingDefaults

if TYPE_CHECKING:
    from headrace_models import GenerationDefaults, ModelSource


@frozen(kw_only=True)
class TextSide:
    """Codec and sampling defaults of one model."""

    codec: ChatCodec
    sampling_defaults: SamplingDefaults


def load_text_side(source: "ModelSource", sampling: SamplingSettings, chat_template: str | None = None) -> TextSide:
    """Load the codec and merge the defaults; may take tenths of a second.

    Args:
        chat_template: file with a Jinja template to use instead of the model's own; it is tried at once.

    Raises:
        ModelError: when a file is missing or cannot be used, or the template renders no message.
        ModelUnavailable: the template's file cannot be read.
    """
    from headrace_models import load_codec, read_config
    from headrace_models.gguf_file import read_gguf

    gguf = read_gguf(source.path) if source.format == "gguf" else None
    config = read_config(source, gguf=gguf)
    template = None if chat_template is None else _read_template(chat_template)
    codec = load_codec(source, gguf=gguf, eos_token_ids=config.eos_token_ids, chat_template=template)
    if template is not None:
        # A template that does not compile should end the start, not the first request.
        codec.prepare_chat([{"role": "user", "content": "Hello"}])
    return TextSide(codec=codec, sampling_defaults=merge_defaults(sampling, config.generation))


def _read_template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"the chat template {path!r} cannot be read: {error}; check --chat-template") from error


def merge_defaults(operator: SamplingSettings, model: "GenerationDefaults") -> SamplingDefaults:
    """Take each default from the operator, else from the model's authors, else from the built-ins."""
    merged = asdict(SamplingDefaults())
    for name in merged:
        for chosen in (getattr(operator, name), getattr(model, name)):
            if chosen is not None:
                merged[name] = chosen
                break
    return SamplingDefaults(**merged)
