"""What tells one dense decoder family from another: a declarative descriptor, without arrays."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from attrs import field, frozen

__all__ = ["Activation", "Family", "LayerNorms", "NormKind", "WindowRule"]

Activation = Literal["silu", "gelu", "gelu_tanh"]
NormKind = Literal["rms", "rms_plus_one", "layer"]
WindowRule = Literal["none", "layer_types", "all", "even", "pattern", "upper"]

_NOTHING: Mapping[str, tuple[object, ...]] = MappingProxyType({})


@frozen(kw_only=True)
class LayerNorms:
    """Names of a layer's norms in a checkpoint; None where the family has none."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_feed_forward: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None

    @property
    def names(self) -> list[str]:
        """The norms that there are."""
        every = (self.before_attention, self.after_attention, self.before_feed_forward, self.after_feed_forward)
        return [name for name in every if name is not None]


@frozen(kw_only=True)
class Family:
    """A dense decoder family; the defaults are those of llama. `*_field` is the name of a setting in config.json.

    Attributes:
        norm: root mean square with gain w, with gain 1 + w, or mean and variance with gain and bias.
        norms: where a layer has norms.
        epsilon_field: of the norms.
        head_norm: norm of queries and keys, over each head or over all heads together; None for none.
        stacks_qkv: whether the checkpoint has one `qkv_proj`.
        qkv_bias: of q, k and v; None leaves it to `attention_bias`.
        out_bias: of the attention's output; None leaves it to `attention_bias`.
        feed_forward: `gated` has gate, up and down; `stacked` has gate and up as one matrix; `plain` has no gate.
        feed_forward_bias: None leaves it to `mlp_bias`.
        activation_field: of the feed-forward.
        default_activation: where that setting is absent.
        is_tied: whether the embedding is the head where `tie_word_embeddings` is absent.
        inverse_root_scale_field: attention scores are scaled by this setting to the power -1/2.
        scale_field: attention scores are scaled by this setting. Without either, by head_dim to the power -1/2.
        attention_softcap_field: bound of the attention scores.
        logit_softcap_field: bound of the logits.
        embedding_scale: `root` multiplies embeddings by the root of their size, rounded to bfloat16 or not.
        embedding_scale_field: a setting that multiplies embeddings.
        residual_scale_field: a setting that multiplies what each block adds.
        logit_divisor_field: a setting that divides the logits.
        windows: which layers see a sliding window, see `headrace_models.windows`.
        has_local_rope: whether windowed layers have a rope of their own, unscaled and with another base.
        has_ropeless_layers: whether `no_rope_layers` is read.
        is_rope_traditional: whether rope turns pairs of neighbours rather than halves of a head.
        has_unit_scale: whether attention scores are not scaled at all.
        has_value_norm: whether value heads are normed, without a gain.
        global_head_dim_field: head size of layers without a window.
        global_kv_heads_field: their number of key and value heads, where keys are values.
        keys_are_values_field: whether those layers project no values and take the projected keys.
        num_sharing_field: how many of the last layers attend to keys and values of an earlier one.
        wide_sharing_field: whether these have a feed-forward twice as wide.
        per_layer_size_field: size of what every layer gets from the token itself, 0 for none.
        has_layer_scale: whether each layer's output is multiplied by a number of the checkpoint.
        required: settings that a file must have, because programs differ about what stands for a missing one.
        refused: settings, with the values that ask for something that is not computed.
    """

    norm: NormKind = "rms"
    norms: LayerNorms = field(factory=LayerNorms)
    epsilon_field: str = "rms_norm_eps"
    head_norm: Literal["each", "all"] | None = None
    stacks_qkv: bool = False
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    feed_forward: Literal["gated", "stacked", "plain"] = "gated"
    feed_forward_bias: bool | None = None
    activation_field: str = "hidden_act"
    default_activation: str = "silu"
    is_tied: bool = False
    inverse_root_scale_field: str | None = None
    scale_field: str | None = None
    attention_softcap_field: str | None = None
    logit_softcap_field: str | None = None
    embedding_scale: Literal["none", "root", "root_bfloat16"] = "none"
    embedding_scale_field: str | None = None
    residual_scale_field: str | None = None
    logit_divisor_field: str | None = None
    windows: WindowRule = "layer_types"
    has_local_rope: bool = False
    has_ropeless_layers: bool = False
    is_rope_traditional: bool = False
    has_unit_scale: bool = False
    has_value_norm: bool = False
    global_head_dim_field: str | None = None
    global_kv_heads_field: str | None = None
    keys_are_values_field: str | None = None
    num_sharing_field: str | None = None
    wide_sharing_field: str | None = None
    per_layer_size_field: str | None = None
    has_layer_scale: bool = False
    required: tuple[str, ...] = ()
    refused: Mapping[str, tuple[object, ...]] = _NOTHING
