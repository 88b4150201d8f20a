"""The tensors that a checkpoint of a configuration must have, by Hugging Face name, without arrays."""

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from headrace_models.errors import WeightMismatch
from headrace_models.families import family_of
from headrace_models.layer_shapes import layer_shapes, per_layer_shape

if TYPE_CHECKING:
    from headrace_models.config import ModelConfig
    from headrace_models.family import Family
    from headrace_models.layer_shapes import LayerShape

__all__ = ["check_num_layers", "tensor_shapes"]

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def check_num_layers(config: "ModelConfig", names: Collection[str]) -> None:
    """Hold the number of layers against a checkpoint's tensor names, before anything is made per layer.

    Raises:
        WeightMismatch: the checkpoint has more or fewer layers.
    """
    found = {int(match[1]) for match in map(_LAYER.match, names) if match is not None}
    num_layers = max(found, default=-1) + 1
    if num_layers != config.num_hidden_layers:
        first, last = sorted((num_layers, config.num_hidden_layers))
        problem = "missing" if num_layers == first else "unexpected"
        raise WeightMismatch(
            f"num_hidden_layers is {config.num_hidden_layers!r}, but the weights have {num_layers} layers; "
            f"{problem}: model.layers.{first} to model.layers.{last - 1}. "
            "Check that config.json and the weight files belong together and that the download is complete."
        )


def tensor_shapes(config: "ModelConfig") -> dict[str, tuple[int, ...]]:
    """Return every needed tensor with its unpacked shape.

    Raises:
        UnsupportedArchitecture: no family has this model type.
    """
    family = family_of(config.model_type)
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    shapes.update(_norm("model.norm", hidden, family))
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    shapes.update(_per_layer_inputs(config, family))
    in_layer = {shape: dict(_layer_tensors(config, family, shape)) for shape in set(layer_shapes(family, config))}
    for index, shape in enumerate(layer_shapes(family, config)):
        shapes.update({f"model.layers.{index}.{name}": size for name, size in in_layer[shape].items()})
    return shapes


def _per_layer_inputs(config: "ModelConfig", family: "Family") -> Iterator[tuple[str, tuple[int, ...]]]:
    shape = per_layer_shape(family, config)
    if shape is not None:
        size = config.num_hidden_layers * shape.size
        yield "model.embed_tokens_per_layer.weight", (shape.vocab_size, size)
        yield "model.per_layer_model_projection.weight", (size, config.hidden_size)
        yield "model.per_layer_projection_norm.weight", (shape.size,)


def _layer_tensors(
    config: "ModelConfig", family: "Family", shape: "LayerShape"
) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in family.norms.names:
        yield from _norm(name, config.hidden_size, family)
    if family.has_layer_scale:
        yield "layer_scalar", (1,)
    yield from _head_norms(config, family, shape)
    for name, rows, columns, has_bias in _matrices(config, family, shape):
        yield f"{name}.weight", (rows, columns)
        if has_bias:
            yield f"{name}.bias", (rows,)
    per_layer = per_layer_shape(family, config)
    if per_layer is not None:
        yield "per_layer_input_gate.weight", (per_layer.size, config.hidden_size)
        yield "per_layer_projection.weight", (config.hidden_size, per_layer.size)
        yield from _norm("post_per_layer_input_norm", config.hidden_size, family)


def _head_norms(config: "ModelConfig", family: "Family", shape: "LayerShape") -> Iterator[tuple[str, tuple[int, ...]]]:
    if family.head_norm is None:
        return
    is_whole = family.head_norm == "all"
    yield "self_attn.q_norm.weight", (shape.head_dim * (config.num_attention_heads if is_whole else 1),)
    if shape.source is None:
        yield "self_attn.k_norm.weight", (shape.head_dim * (shape.num_kv_heads if is_whole else 1),)


def _norm(name: str, size: int, family: "Family") -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (size,)
    if family.norm == "layer":
        yield f"{name}.bias", (size,)


def _matrices(config: "ModelConfig", family: "Family", shape: "LayerShape") -> Iterator[tuple[str, int, int, bool]]:
    hidden, middle = config.hidden_size, shape.intermediate_size
    q_rows, kv_rows = config.num_attention_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    qkv_bias = config.attention_bias if family.qkv_bias is None else family.qkv_bias
    if family.stacks_qkv:
        yield "self_attn.qkv_proj", q_rows + 2 * kv_rows, hidden, qkv_bias
    else:
        yield "self_attn.q_proj", q_rows, hidden, qkv_bias
        if shape.source is None:
            yield "self_attn.k_proj", kv_rows, hidden, qkv_bias
        if shape.source is None and shape.has_values:
            yield "self_attn.v_proj", kv_rows, hidden, qkv_bias
    yield "self_attn.o_proj", hidden, q_rows, config.attention_bias if family.out_bias is None else family.out_bias
    has_bias = config.mlp_bias if family.feed_forward_bias is None else family.feed_forward_bias
    match family.feed_forward:
        case "gated":
            yield "mlp.gate_proj", middle, hidden, has_bias
            yield "mlp.up_proj", middle, hidden, has_bias
            yield "mlp.down_proj", hidden, middle, has_bias
        case "stacked":
            yield "mlp.gate_up_proj", 2 * middle, hidden, has_bias
            yield "mlp.down_proj", hidden, middle, has_bias
        case "plain":
            yield "mlp.c_fc", middle, hidden, has_bias
            yield "mlp.c_proj", hidden, middle, has_bias
