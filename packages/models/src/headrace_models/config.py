"""What a model is: sizes, positions, end tokens, quantization and sampling defaults, from a folder or a GGUF file."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import cast

from attrs import field, frozen

from headrace_models.errors import SourceError, UnsupportedFormat
from headrace_models.families import FAMILIES, unknown_family
from headrace_models.family import Family
from headrace_models.fields import Fields
from headrace_models.folder import read_json_object
from headrace_models.gguf_config import gguf_settings
from headrace_models.gguf_file import GgufFile, read_gguf
from headrace_models.sources import ModelSource
from headrace_models.tokenizer import read_tokenizer
from headrace_models.wrappers import text_fields

__all__ = ["GenerationDefaults", "ModelConfig", "Quantization", "read_config"]

_ADDED_TOKEN = rb'"id"\s*:\s*(\d+)\s*,\s*"content"\s*:\s*'
_ADDED_TOKENS_BYTES = 1 << 22


@frozen(kw_only=True)
class GenerationDefaults:
    """Sampling settings that the model's authors recommend; None where they say nothing.

    An explicit `do_sample: false` in generation_config.json without a temperature reads as temperature 0.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@frozen(kw_only=True)
class Quantization:
    """How an MLX folder packs its weights.

    Attributes:
        bits: per weight.
        group_size: weights that share a scale.
        mode: MLX's name of the scheme, `affine` unless the folder says otherwise.
        overrides: by module path; None means that the module is not quantized.
    """

    bits: int
    group_size: int
    mode: str = "affine"
    overrides: Mapping[str, "Quantization | None"] = field(factory=dict[str, "Quantization | None"])


@frozen(kw_only=True)
class ModelConfig:
    """A decoder's configuration, under Hugging Face's field names wherever one exists.

    Attributes:
        model_type: the architecture family, for example `llama`.
        rope_scaling: settings of a scaled rope, as the file gives them; None for the plain rope.
        rope_theta: base of the rope's frequencies.
        max_positions: longest context, prompt and reply together, in tokens.
        eos_token_ids: every token that ends a reply: union of config.json, generation_config.json and tokenizer.
        dtype: the checkpoint's own element type, for example `bfloat16`; None if it does not say.
        quantization: of an MLX folder; None for plain weights and for GGUF, whose tensors carry their own types.
        generation: sampling settings that the authors recommend.
        raw: the whole configuration in config.json's form, read-only; families read rarer settings from it. Of a
            model that sees or hears, the text model's.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    rope_theta: float
    rope_scaling: Mapping[str, object] | None
    max_positions: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    dtype: str | None
    quantization: Quantization | None
    generation: GenerationDefaults
    raw: Mapping[str, object] = field(repr=False)


def read_config(source: ModelSource, *, gguf: GgufFile | None = None) -> ModelConfig:
    """Read the configuration of a model.

    Args:
        source: the model's files.
        gguf: the file's head, when the caller has parsed it already.

    Raises:
        SourceError: a file or field is missing or has the wrong type.
        UnsupportedFormat: the weights are packed in a way that is not read.
        UnsupportedArchitecture: the model type is not known, and the file does not name its sizes as known ones do.
    """
    if source.format == "gguf":
        file = gguf or read_gguf(source.path)
        settings, generation = gguf_settings(file)
        fields = Fields(settings, origin=f"the metadata of {str(source.path)!r}")
        return _model_config(fields, Fields(generation, origin=fields.origin), frozenset())
    path = source.path / "config.json"
    fields = text_fields(Fields(read_json_object(path), origin=repr(str(path))))
    path = source.path / "generation_config.json"
    generation = read_json_object(path) if path.is_file() else {}
    return _model_config(fields, Fields(generation, origin=repr(str(path))), _tokenizer_eos(source.path))


def _model_config(fields: Fields, generation: Fields, tokenizer_eos: frozenset[int]) -> ModelConfig:
    model_type = fields.text("model_type")
    if model_type in FAMILIES:
        return _family_config(FAMILIES[model_type], fields, generation, tokenizer_eos)
    try:
        return _family_config(Family(), fields, generation, tokenizer_eos)
    except SourceError as error:
        raise unknown_family(model_type) from error


def _family_config(family: Family, fields: Fields, generation: Fields, tokenizer_eos: frozenset[int]) -> ModelConfig:
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise SourceError(
            f"'hidden_size' {hidden_size} of {fields.origin} is no multiple of 'num_attention_heads' {num_heads} "
            f"and there is no 'head_dim': complete the file"
        )
    num_kv_heads = fields.count("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise SourceError(
            f"'num_attention_heads' of {fields.origin} is {num_heads}; a multiple of 'num_key_value_heads' "
            f"{num_kv_heads} is expected: correct the file"
        )
    vocab_size = fields.count("vocab_size")
    rope_theta, rope_scaling = _rope(fields)
    bos = fields.token_ids("bos_token_id")
    return ModelConfig(
        model_type=fields.text("model_type"),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_hidden_layers=fields.count("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=fields.count("head_dim", default=hidden_size // num_heads),
        rms_norm_eps=fields.number(family.epsilon_field),
        hidden_act=fields.text(family.activation_field, default=family.default_activation),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_positions=fields.count("max_position_embeddings"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=family.is_tied),
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        bos_token_id=min(bos, default=None),
        eos_token_ids=_end_tokens(fields, generation, tokenizer_eos, vocab_size),
        dtype=_dtype(fields),
        quantization=_quantization(fields),
        generation=_generation_defaults(generation),
        raw=MappingProxyType(dict(fields.values)),
    )


def _end_tokens(fields: Fields, generation: Fields, tokenizer: frozenset[int], vocab_size: int) -> frozenset[int]:
    found = fields.token_ids("eos_token_id") | generation.token_ids("eos_token_id") | tokenizer
    outside = sorted(token for token in found if token >= vocab_size)
    if outside:
        raise SourceError(
            f"end token {outside[0]} of {fields.origin} or its neighbours lies outside the vocabulary of {vocab_size}: "
            f"correct 'eos_token_id' or 'vocab_size'"
        )
    return found


def _rope(fields: Fields) -> tuple[float, Mapping[str, object] | None]:
    """Read base and scaling from either form: `rope_theta` with `rope_scaling`, or `rope_parameters` with both."""
    scaling = fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {}
    if isinstance(scaling.get("full_attention"), dict):
        # One entry for each kind of layer; the windowed ones' is read where layers are told apart.
        scaling = cast("dict[str, object]", scaling["full_attention"])
    nested = Fields(scaling, origin=f"the rope settings of {fields.origin}")
    theta = nested.number("rope_theta", default=fields.number("rope_theta", default=10_000.0))
    kind = nested.text("rope_type", default=nested.text("type", default="default"))
    return theta, None if kind == "default" else MappingProxyType({**scaling, "rope_type": kind})


def _dtype(fields: Fields) -> str | None:
    for name in ("dtype", "torch_dtype"):
        if fields.has(name):
            return fields.text(name).removeprefix("torch.")
    return None


def _quantization(fields: Fields) -> Quantization | None:
    settings = fields.mapping("quantization")
    if settings is not None:
        return _mlx_quantization(settings, origin=fields.origin)
    foreign = fields.mapping("quantization_config")
    if foreign is None:
        return None
    if "quant_method" in foreign or "bits" not in foreign:
        raise UnsupportedFormat(
            f"'quantization_config' of {fields.origin} is for method {foreign.get('quant_method')!r}; plain weights, "
            f"MLX's quantization and GGUF are read: choose one of these forms of the model"
        )
    return _mlx_quantization(foreign, origin=fields.origin)


def _mlx_quantization(settings: Mapping[str, object], *, origin: str) -> Quantization:
    overrides: dict[str, Quantization | None] = {}
    for path, value in settings.items():
        if value is False:
            overrides[path] = None
        elif isinstance(value, dict):
            nested = cast("dict[str, object]", value)
            overrides[path] = _one_quantization({**settings, **nested}, {}, origin=f"{path!r} in {origin}")
    return _one_quantization(settings, overrides, origin=f"'quantization' in {origin}")


def _one_quantization(
    settings: Mapping[str, object], overrides: Mapping[str, Quantization | None], *, origin: str
) -> Quantization:
    fields = Fields(settings, origin=origin)
    return Quantization(
        bits=fields.count("bits"),
        group_size=fields.count("group_size"),
        mode=fields.text("mode", default="affine"),
        overrides=MappingProxyType(dict(overrides)),
    )


def _generation_defaults(fields: Fields) -> GenerationDefaults:
    temperature = fields.optional_number("temperature")
    if temperature is None and fields.has("do_sample") and not fields.flag("do_sample"):
        temperature = 0.0
    top_k = fields.values.get("top_k")
    return GenerationDefaults(
        temperature=temperature,
        top_p=fields.optional_number("top_p"),
        # Zero is how a file says "no top-k".
        top_k=0 if type(top_k) is int and top_k == 0 else fields.optional_count("top_k"),
        min_p=fields.optional_number("min_p"),
        repetition_penalty=fields.optional_number("repetition_penalty"),
    )


def _tokenizer_eos(folder: Path) -> frozenset[int]:
    """Look the tokenizer's end token up; its text is in one file and its id, at worst, in another."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return frozenset()
    settings = read_json_object(path)
    token = settings.get("eos_token")
    if isinstance(token, dict):
        token = cast("dict[str, object]", token).get("content")
    if token is None:
        return frozenset()
    if not isinstance(token, str):
        raise SourceError(
            f"'eos_token' of {str(path)!r} is {token!r}; a string or an object with 'content' is expected"
        )
    added = settings.get("added_tokens_decoder")
    if isinstance(added, dict):
        for token_id, entry in cast("dict[str, object]", added).items():
            same = isinstance(entry, dict) and cast("dict[str, object]", entry).get("content") == token
            if same and token_id.isdecimal():
                return frozenset({int(token_id)})
    return _vocabulary_id(folder, token)


def _vocabulary_id(folder: Path, token: str) -> frozenset[int]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return frozenset()
    found = _added_token_id(path, token)
    if found is None:
        found = read_tokenizer(path).token_to_id(token)
    return frozenset() if found is None else frozenset({found})


def _added_token_id(path: Path, token: str) -> int | None:
    """Look a token up among the added ones at the file's beginning; reading a large vocabulary takes a second."""
    content = json.dumps(token, ensure_ascii=False).encode("utf-8", "surrogatepass")
    try:
        with path.open("rb") as file:
            found = re.search(_ADDED_TOKEN + re.escape(content) + rb"\s*[,}]", file.read(_ADDED_TOKENS_BYTES))
    except OSError:
        # Whoever reads the whole file says what is wrong with it.
        return None
    return None if found is None else int(found[1])
