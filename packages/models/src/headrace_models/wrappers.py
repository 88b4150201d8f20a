"""Checkpoints of models that see and hear, read for their text part: which settings and which tensors it has.

config.json of such a model keeps the text model's settings in `text_config`; the tensors' names say which part each
belongs to, in one of two orders: `language_model.model.layers...` (MLX, and older files of transformers) or
`model.language_model.layers...` (newer ones).
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from attrs import frozen

from headrace_models.errors import SourceError
from headrace_models.fields import Fields

__all__ = ["WRAPPERS", "PartNames", "Wrapper", "part_names", "text_fields", "text_name"]

_PARTS = ("audio_tower", "embed_audio", "embed_vision", "multi_modal_projector", "vision_tower")
_SHARED = ("bos_token_id", "dtype", "tie_word_embeddings", "torch_dtype", "vocab_size")
_QUANTIZATIONS = ("quantization", "quantization_config")


@frozen(kw_only=True)
class Wrapper:
    """A kind of model around a text model.

    Attributes:
        text_type: `model_type` of the text model.
        defaults: settings that files leave out of `text_config`, and about whose value programs agree.
    """

    text_type: str
    defaults: Mapping[str, object]


WRAPPERS: Mapping[str, Wrapper] = MappingProxyType(
    {
        "gemma3": Wrapper(
            text_type="gemma3_text",
            # Released files have no more than what differs from these of transformers' Gemma3TextConfig.
            defaults=MappingProxyType(
                {
                    "vocab_size": 262_208,
                    "num_attention_heads": 8,
                    "num_key_value_heads": 4,
                    "head_dim": 256,
                    "rms_norm_eps": 1e-6,
                    "max_position_embeddings": 131_072,
                    "rope_theta": 1_000_000.0,
                    "rope_local_base_freq": 10_000.0,
                    "query_pre_attn_scalar": 256,
                }
            ),
        ),
        "gemma4": Wrapper(
            text_type="gemma4_text",
            defaults=MappingProxyType(
                {
                    "vocab_size": 262_144,
                    "num_attention_heads": 8,
                    "rms_norm_eps": 1e-6,
                    "max_position_embeddings": 131_072,
                }
            ),
        ),
    }
)
"""By `model_type`."""


def text_fields(fields: Fields) -> Fields:
    """Return the settings of the text model, as its own config.json would have them; those of a text model as they are.

    Raises:
        SourceError: `text_config` is missing or no object.
    """
    wrapper = WRAPPERS.get(fields.text("model_type"))
    if wrapper is None:
        return fields
    found = fields.mapping("text_config")
    if found is None:
        raise SourceError(f"{fields.origin} has no 'text_config'; the text model's settings are expected: complete it")
    nested = Fields(found, origin=f"'text_config' of {fields.origin}")
    outer = {name: fields.values[name] for name in _SHARED if fields.has(name)}
    inner = {name: value for name, value in nested.values.items() if value is not None}
    settings: dict[str, object] = {**wrapper.defaults, **outer, **inner, "model_type": wrapper.text_type}
    end_tokens = fields.token_ids("eos_token_id") | nested.token_ids("eos_token_id")
    if end_tokens:
        settings["eos_token_id"] = sorted(end_tokens)
    for name in _QUANTIZATIONS:
        packing = fields.mapping(name) or nested.mapping(name)
        if packing is not None:
            settings[name] = {text_name(path) or path: value for path, value in packing.items() if not _part(path)}
    return Fields(settings, origin=fields.origin)


@frozen
class PartNames:
    """The tensors of a checkpoint by the part of the model that has them.

    Attributes:
        text: from the text model's own name of a tensor to that in the file.
        left_out: how many tensors the other parts have, by part.
    """

    text: Mapping[str, str]
    left_out: Mapping[str, int]


def part_names(names: Iterable[str]) -> PartNames:
    """Sort names of tensors; without a text part among other parts, all of them are the text model's own."""
    names = list(names)
    if not any(text_name(name) for name in names):
        return PartNames({name: name for name in names}, {})
    text: dict[str, str] = {}
    left_out: dict[str, int] = {}
    for name in names:
        part = _part(name)
        if part is None:
            text[text_name(name) or name] = name
        else:
            left_out[part] = left_out.get(part, 0) + 1
    return PartNames(text, left_out)


def text_name(name: str) -> str | None:
    """Return the text model's own name of one of its tensors or modules; None if the name tells no parts apart."""
    match name.split(".", 2):
        case ["language_model", "model", rest] | ["model", "language_model", rest]:
            return f"model.{rest}"
        case ["language_model", "lm_head", rest]:
            return f"lm_head.{rest}"
        case ["language_model", "lm_head"]:
            return "lm_head"
        case _:
            return None


def _part(name: str) -> str | None:
    first = name.removeprefix("model.").partition(".")[0]
    return first if first in _PARTS else None
