"""The dense families that run, by `model_type`."""

from collections.abc import Mapping
from types import MappingProxyType

from headrace_models.errors import UnsupportedArchitecture
from headrace_models.family import Family, LayerNorms
from headrace_models.wrappers import WRAPPERS

__all__ = ["FAMILIES", "family_of", "unknown_family"]

_GEMMA_NORMS = LayerNorms(
    after_attention="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)
_EXIT_NORMS = LayerNorms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_feed_forward=None,
    after_feed_forward="post_feedforward_layernorm",
)
_GLM_NORMS = LayerNorms(after_attention="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gemma": Family(
            norm="rms_plus_one",
            activation_field="hidden_activation",
            default_activation="gelu_pytorch_tanh",
            is_tied=True,
            embedding_scale="root",
            windows="none",
        ),
        "gemma2": Family(
            norm="rms_plus_one",
            norms=_GEMMA_NORMS,
            activation_field="hidden_activation",
            default_activation="gelu_pytorch_tanh",
            is_tied=True,
            inverse_root_scale_field="query_pre_attn_scalar",
            attention_softcap_field="attn_logit_softcapping",
            logit_softcap_field="final_logit_softcapping",
            embedding_scale="root",
            windows="even",
        ),
        "gemma3_text": Family(
            norm="rms_plus_one",
            norms=_GEMMA_NORMS,
            head_norm="each",
            activation_field="hidden_activation",
            default_activation="gelu_pytorch_tanh",
            is_tied=True,
            inverse_root_scale_field="query_pre_attn_scalar",
            attention_softcap_field="attn_logit_softcapping",
            logit_softcap_field="final_logit_softcapping",
            embedding_scale="root_bfloat16",
            windows="pattern",
            has_local_rope=True,
        ),
        "gemma4_text": Family(
            norms=_GEMMA_NORMS,
            head_norm="each",
            has_value_norm=True,
            has_unit_scale=True,
            activation_field="hidden_activation",
            default_activation="gelu_pytorch_tanh",
            is_tied=True,
            logit_softcap_field="final_logit_softcapping",
            embedding_scale="root",
            has_local_rope=True,
            global_head_dim_field="global_head_dim",
            global_kv_heads_field="num_global_key_value_heads",
            keys_are_values_field="attention_k_eq_v",
            num_sharing_field="num_kv_shared_layers",
            wide_sharing_field="use_double_wide_mlp",
            per_layer_size_field="hidden_size_per_layer_input",
            has_layer_scale=True,
            required=("head_dim", "global_head_dim", "layer_types", "num_key_value_heads", "rope_parameters"),
            refused=MappingProxyType(
                {"enable_moe_block": (True,), "use_bidirectional_attention": ("all", True), "attention_bias": (True,)}
            ),
        ),
        "glm4": Family(
            norms=_GLM_NORMS,
            out_bias=False,
            feed_forward="stacked",
            feed_forward_bias=False,
            windows="none",
            is_rope_traditional=True,
        ),
        "granite": Family(
            is_tied=True,
            scale_field="attention_multiplier",
            embedding_scale_field="embedding_multiplier",
            residual_scale_field="residual_multiplier",
            logit_divisor_field="logits_scaling",
            windows="none",
        ),
        "llama": Family(),
        "mistral": Family(windows="all"),
        "olmo2": Family(norms=_EXIT_NORMS, head_norm="all", windows="none"),
        "phi3": Family(
            stacks_qkv=True,
            qkv_bias=False,
            out_bias=False,
            feed_forward="stacked",
            feed_forward_bias=False,
            windows="all",
        ),
        "qwen2": Family(qkv_bias=True, out_bias=False, feed_forward_bias=False, windows="upper"),
        "qwen3": Family(head_norm="each", feed_forward_bias=False, windows="upper"),
        "smollm3": Family(is_tied=True, has_ropeless_layers=True),
        "starcoder2": Family(
            norm="layer",
            epsilon_field="norm_epsilon",
            qkv_bias=True,
            out_bias=True,
            feed_forward="plain",
            feed_forward_bias=True,
            default_activation="gelu_pytorch_tanh",
            is_tied=True,
            windows="all",
        ),
    }
)


def family_of(model_type: str) -> Family:
    """Return the descriptor of a model type.

    Raises:
        UnsupportedArchitecture: naming the type and the families that run.
    """
    if model_type not in FAMILIES:
        raise unknown_family(model_type)
    return FAMILIES[model_type]


def unknown_family(model_type: str) -> UnsupportedArchitecture:
    """Make the error that names a model type and the families that run."""
    return UnsupportedArchitecture(
        f"model_type is {model_type!r}; known families: {', '.join(sorted(FAMILIES))}, and the text models of "
        f"{' and '.join(sorted(WRAPPERS))}. Choose a model of one of them."
    )
