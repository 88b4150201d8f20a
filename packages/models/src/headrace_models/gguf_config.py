"""GGUF metadata in the form of config.json and generation_config.json."""

from collections.abc import Mapping
from typing import cast

from headrace_models.errors import SourceError
from headrace_models.gguf_file import GgufFile

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
}
_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_MODEL_TYPES = {"gemma3": "gemma3_text"}
_LAYERS_OF_GEMMA3_27B = 62


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
        if value is not None:
            settings[name] = _trimmed(value)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        settings.setdefault("vocab_size", len(cast("list[object]", tokens)))
    scaling = _rope_scaling(metadata, architecture)
    if scaling:
        settings["rope_scaling"] = scaling
    # llama.cpp leaves the output matrix out when it is the embedding.
    settings["tie_word_embeddings"] = "output.weight" not in file.tensors
    settings["attention_bias"] = "blk.0.attn_output.bias" in file.tensors
    settings["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None:
        settings["bos_token_id"] = bos
    settings["eos_token_id"] = sorted(gguf_eos_ids(metadata))
    generation = {name: _trimmed(metadata.get(f"general.sampling.{key}")) for key, name in _SAMPLING.items()}
    if architecture == "gemma3":
        settings |= _gemma3_settings(settings)
    return settings, {name: value for name, value in generation.items() if value is not None}


def _gemma3_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Give what llama.cpp does not write, because all Gemma 3 models agree on it, or all but the largest."""
    hidden, heads = settings.get("hidden_size"), settings.get("num_attention_heads")
    is_largest = settings.get("num_hidden_layers") == _LAYERS_OF_GEMMA3_27B
    found: dict[str, object] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    }
    if is_largest and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        found["query_pre_attn_scalar"] = hidden // heads
    elif settings.get("head_dim") is not None:
        found["query_pre_attn_scalar"] = settings["head_dim"]
    return found


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


def _rope_scaling(metadata: Mapping[str, object], architecture: str) -> dict[str, object]:
    found = {name: metadata.get(f"{architecture}.rope.scaling.{key}") for key, name in _ROPE_SCALING.items()}
    scaling = {name: value for name, value in found.items() if value is not None}
    return {} if scaling.get("rope_type", "none") == "none" else scaling


def _trimmed(value: object) -> object:
    """Undo the noise of GGUF's 32-bit floats, so that 1e-5 reads as 1e-5 and not as 9.999999747378752e-06."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
