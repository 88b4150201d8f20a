"""What GGUF files of each architecture call things, and what llama.cpp's converter does to weights and settings.

Sources: llama.cpp's `convert_hf_to_gguf.py` and its loader of hyperparameters, as behaviour; the names are the `gguf`
package's.
"""

from collections.abc import Mapping
from types import MappingProxyType

from attrs import frozen

from headrace_models.errors import UnsupportedArchitecture

__all__ = ["GGUF_FAMILIES", "GgufFamily", "gguf_family_of"]

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_LLAMA = _ATTENTION | {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_STACKED = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_EXIT_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA2 = _LLAMA | _EXIT_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
_GLM4 = {
    **_ATTENTION,
    **_STACKED,
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_OLMO2 = {name: target for name, target in _LLAMA.items() if "norm" not in name} | _HEAD_NORMS | _EXIT_NORMS
_PHI3 = {**_ATTENTION, **_STACKED, "attn_qkv": "self_attn.qkv_proj"}
_STARCODER2 = {**_ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}


@frozen(kw_only=True)
class GgufFamily:
    """The files of one architecture; the defaults are those of most.

    Attributes:
        names: Hugging Face's name of each module in a layer.
        has_shifted_norms: whether norm gains are stored as 1 + w.
        has_paired_rows: whether rows of q and k are stored in pairs, for a rope over neighbours.
        fields: settings of the architecture's own keys: the key's end to Hugging Face's field.
        fixed: settings that all models agree on, and files do not carry.
        large: number of layers of the one model whose scores are scaled by hidden_size / heads instead of head_dim;
            None where files do not leave `query_pre_attn_scalar` to the reader.
    """

    names: Mapping[str, str]
    has_shifted_norms: bool = False
    has_paired_rows: bool = False
    fields: Mapping[str, str] = MappingProxyType({})
    fixed: Mapping[str, object] = MappingProxyType({})
    large: int | None = None


_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}

GGUF_FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "gemma": GgufFamily(names=_LLAMA, has_shifted_norms=True, fixed=_GELU),
        "gemma2": GgufFamily(
            names=_GEMMA2,
            has_shifted_norms=True,
            fields=_SOFTCAPS,
            fixed=_GELU | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096},
            large=46,
        ),
        "gemma3_text": GgufFamily(
            names=_GEMMA2 | _HEAD_NORMS,
            has_shifted_norms=True,
            fields=_SOFTCAPS | {"rope.freq_base_swa": "rope_local_base_freq"},
            fixed=_GELU | {"rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6},
            large=62,
        ),
        "glm4": GgufFamily(names=_GLM4),
        "granite": GgufFamily(
            names=_LLAMA,
            has_paired_rows=True,
            fields={
                "attention.scale": "attention_multiplier",
                "embedding_scale": "embedding_multiplier",
                "residual_scale": "residual_multiplier",
                "logit_scale": "logits_scaling",
            },
        ),
        "llama": GgufFamily(names=_LLAMA, has_paired_rows=True),
        "olmo2": GgufFamily(names=_OLMO2),
        "phi3": GgufFamily(names=_PHI3),
        "qwen2": GgufFamily(names=_LLAMA),
        "qwen3": GgufFamily(names=_LLAMA | _HEAD_NORMS),
        "smollm3": GgufFamily(names=_LLAMA, has_paired_rows=True),
        "starcoder2": GgufFamily(
            names=_STARCODER2,
            fields={"attention.layer_norm_epsilon": "norm_epsilon"},
            fixed={"hidden_act": "gelu_pytorch_tanh"},
        ),
    }
)
"""By `model_type`. Mistral's files are of the architecture llama."""


def gguf_family_of(model_type: str) -> GgufFamily:
    """Return what is known of an architecture's files.

    Raises:
        UnsupportedArchitecture: naming the type and those that are read.
    """
    if model_type not in GGUF_FAMILIES:
        raise UnsupportedArchitecture(
            f"GGUF files of {model_type!r} models are not read, only those of {', '.join(sorted(GGUF_FAMILIES))}. "
            "Use the model's Hugging Face folder."
        )
    return GGUF_FAMILIES[model_type]
