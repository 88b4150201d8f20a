"""GGUF metadata in the form of config.json and generation_config.json."""

from collections.abc import Mapping
from typing import cast

from headrace_models.errors import SourceError, UnsupportedFormat
from headrace_models.gguf_families import GGUF_FAMILIES
from headrace_models.gguf_file import GgufFile, dequantize

__all__ = ["gguf_eos_ids", "gguf_settings"]

_CONTROL = 3
_TURN_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"})
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# GGUF's key below the architecture's name -> Hugging Face's field.
_SIZES = {
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
}
_ROPE_SCALING = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_ROPE_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_MODEL_TYPES = {"gemma3": "gemma3_text"}


def gguf_settings(file: GgufFile) -> tuple[dict[str, object], dict[str, object]]:
    """Translate metadata into the settings of config.json and of generation_config.json.

    Returns:
        The two sets of settings; their types are checked by who reads them.

    Raises:
        SourceError: the file does not name its architecture.
    """
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise SourceError(
            f"'general.architecture' of {str(file.path)!r} is {architecture!r}; a string is expected: "
            f"convert the model again"
        )
    settings: dict[str, object] = {"model_type": _MODEL_TYPES.get(architecture, architecture)}
    for key, name in _SIZES.items():
        value = metadata.get(f"{architecture}.{key}")
        # A window of 0 is how a file says that there is none.
        if value is not None and (name, value) != ("sliding_window", 0):
            settings[name] = _trimmed(value)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        settings.setdefault("vocab_size", len(cast("list[object]", tokens)))
    settings |= _partial_rope(metadata.get(f"{architecture}.rope.dimension_count"), settings)
    scaling = _rope_scaling(file, architecture)
    if scaling:
        settings["rope_scaling"] = scaling
    # llama.cpp leaves the output matrix out when it is the embedding.
    settings["tie_word_embeddings"] = "output.weight" not in file.tensors
    settings["attention_bias"] = not file.tensors.keys().isdisjoint({"blk.0.attn_q.bias", "blk.0.attn_output.bias"})
    settings["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None:
        settings["bos_token_id"] = bos
    settings["eos_token_id"] = sorted(gguf_eos_ids(metadata))
    generation = {name: _trimmed(metadata.get(f"general.sampling.{key}")) for key, name in _SAMPLING.items()}
    return settings | _family_settings(settings, metadata, architecture), {
        name: value for name, value in generation.items() if value is not None
    }


def _family_settings(
    settings: Mapping[str, object], metadata: Mapping[str, object], architecture: str
) -> dict[str, object]:
    """Give an architecture's own settings, with those that its files leave out because the models agree on them."""
    family = GGUF_FAMILIES.get(str(settings["model_type"]))
    if family is None:
        return {}
    found = {name: value for name, value in family.fixed.items() if name not in settings}
    for key, name in family.fields.items():
        value = metadata.get(f"{architecture}.{key}")
        if value is not None:
            found[name] = _trimmed(value)
    if family.large is not None:
        head_dim = _head_dim(
            {**settings, "head_dim": None} if settings.get("num_hidden_layers") == family.large else settings
        )
        if head_dim is not None:
            found["query_pre_attn_scalar"] = head_dim
    return found


def _head_dim(settings: Mapping[str, object]) -> int | None:
    head_dim, hidden, heads = (settings.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if type(head_dim) is int:
        return head_dim
    return hidden // heads if type(hidden) is int and type(heads) is int and heads > 0 else None


def _partial_rope(num_turned: object, settings: Mapping[str, object]) -> dict[str, object]:
    """Say which share of a head is turned, if the file says that it is not all."""
    head_dim = _head_dim(settings)
    if type(num_turned) is not int or not head_dim or num_turned == head_dim:
        return {}
    share = num_turned / head_dim
    # Readers cut the product off, and a share that is no sum of halves may come back one too small.
    return {"partial_rotary_factor": share if int(head_dim * share) == num_turned else (num_turned + 0.5) / head_dim}


def gguf_eos_ids(metadata: Mapping[str, object]) -> frozenset[int]:
    """Collect the ids that end a reply: the declared ones, and control tokens that chat formats end a turn with."""
    declared = {metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS}
    found = {token for token in declared if type(token) is int}
    tokens = cast("list[str]", metadata.get("tokenizer.ggml.tokens") or [])
    types = cast("list[int]", metadata.get("tokenizer.ggml.token_type") or [])
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        if kind == _CONTROL and token in _TURN_ENDS:
            found.add(token_id)
    return frozenset(found)


def _rope_scaling(file: GgufFile, architecture: str) -> dict[str, object]:
    prefix = f"{architecture}.rope.scaling"
    found = {name: file.metadata.get(f"{prefix}.{key}") for key, name in _ROPE_SCALING.items()}
    scaling = {name: _trimmed(value) for name, value in found.items() if value is not None}
    magnitude = file.metadata.get(f"{prefix}.attn_factor")
    if _ROPE_FACTORS["long_factor"] in file.tensors:
        scaling["rope_type"] = "longrope"
        scaling |= {name: _read_factors(file, tensor) for name, tensor in _ROPE_FACTORS.items()}
    elif scaling.get("rope_type", "none") == "none":
        return {}
    if isinstance(magnitude, float) and scaling["rope_type"] == "longrope":
        scaling["attention_factor"] = _trimmed(magnitude)
    elif isinstance(magnitude, float) and magnitude != 1.0:
        raise UnsupportedFormat(
            f"'{prefix}.attn_factor' of {str(file.path)!r} is {magnitude!r}, which is read for longrope alone: "
            "use the model's Hugging Face folder"
        )
    return scaling


def _read_factors(file: GgufFile, name: str) -> list[float]:
    if name not in file.tensors:
        raise SourceError(
            f"{str(file.path)!r} lacks tensor {name!r}, which belongs to its rope: convert the model again"
        )
    return [float(f"{value:.7g}") for value in dequantize(file, file.tensors[name]).tolist()]


def _trimmed(value: object) -> object:
    """Undo the noise of GGUF's 32-bit floats, so that 1e-5 reads as 1e-5 and not as 9.999999747378752e-06."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
