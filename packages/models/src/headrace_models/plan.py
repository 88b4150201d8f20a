"""A family's descriptor and a configuration, resolved to numbers: scales, bounds, and each layer's sizes and rope."""

import struct
from collections.abc import Mapping
from math import sqrt
from typing import cast

from attrs import frozen

from headrace_models.config import ModelConfig
from headrace_models.errors import UnsupportedArchitecture
from headrace_models.families import family_of
from headrace_models.family import Activation, Family
from headrace_models.fields import Fields
from headrace_models.layer_shapes import LayerShape, PerLayerShape, layer_shapes, per_layer_shape
from headrace_models.windows import SLIDING, layer_windows

__all__ = ["Plan", "RopePlan", "make_plan"]

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_LOCAL_BASE = 10_000.0


@frozen(kw_only=True)
class RopePlan:
    """A rotary embedding.

    Attributes:
        size: rotated components of a head, from the first; even.
        base: of the frequencies.
        scaling: settings of a scaled rope; None for the plain one.
        is_traditional: whether pairs are neighbours rather than halves.
    """

    size: int
    base: float
    scaling: Mapping[str, object] | None
    is_traditional: bool


@frozen(kw_only=True)
class Plan:
    """Everything about a model that is not a size or a weight; None leaves a step out.

    Attributes:
        windows: per layer, the positions that a query sees, itself included; None for all.
        ropes: the different rotary embeddings.
        rope_indices: per layer, which of `ropes`; None for no rope.
        shapes: the sizes of each layer.
        per_layer: sizes of the inputs that every layer gets from the token itself.
    """

    family: Family
    activation: Activation
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    embedding_scale: float | None
    residual_scale: float | None
    logit_divisor: float | None
    windows: tuple[int | None, ...]
    ropes: tuple[RopePlan, ...]
    rope_indices: tuple[int | None, ...]
    shapes: tuple[LayerShape, ...]
    per_layer: PerLayerShape | None


def make_plan(config: ModelConfig) -> Plan:
    """Resolve a configuration; the number of layers must have been checked against the weights.

    Raises:
        UnsupportedArchitecture: for a model type or a setting that no family computes.
        SourceError: for a setting of the wrong type.
    """
    family = family_of(config.model_type)
    fields = Fields(config.raw, origin="config.json")
    _check_settings(family, config, fields)
    windows = layer_windows(family, config, fields)
    shapes = layer_shapes(family, config)
    # Where head sizes differ, the global rope turns those of the layers without a window.
    head_dim = next((shape.head_dim for shape, window in zip(shapes, windows, strict=True) if window is None), None)
    global_rope = _global_rope(family, config, fields, head_dim or config.head_dim)
    ropes = [global_rope]
    if family.has_local_rope:
        ropes.append(_local_rope(family, config, fields, global_rope))
    return Plan(
        family=family,
        activation=_activation(family, config),
        attention_scale=_attention_scale(family, config, fields),
        attention_softcap=_optional(fields, family.attention_softcap_field),
        logit_softcap=_optional(fields, family.logit_softcap_field),
        embedding_scale=_embedding_scale(family, config, fields),
        residual_scale=_optional(fields, family.residual_scale_field),
        logit_divisor=_optional(fields, family.logit_divisor_field),
        windows=windows,
        ropes=tuple(ropes),
        rope_indices=_rope_indices(family, config, fields, windows),
        shapes=shapes,
        per_layer=per_layer_shape(family, config),
    )


def _check_settings(family: Family, config: ModelConfig, fields: Fields) -> None:
    for name in family.required:
        if name not in fields.values:
            raise UnsupportedArchitecture(
                f"config.json has no {name!r}; programs differ about its value in a {config.model_type!r} model. "
                "Complete config.json."
            )
    for name, values in family.refused.items():
        if fields.values.get(name) in values:
            raise UnsupportedArchitecture(
                f"{name} is {fields.values[name]!r}; a {config.model_type!r} model runs without it only. "
                "Use a dense checkpoint with causal attention."
            )


def _optional(fields: Fields, name: str | None) -> float | None:
    value = None if name is None else fields.optional_number(name)
    if value is not None and value <= 0:
        raise UnsupportedArchitecture(f"{name!r} is {value!r}; a number above 0 is needed. Correct config.json.")
    return value


def _activation(family: Family, config: ModelConfig) -> Activation:
    if config.hidden_act not in _ACTIVATIONS:
        raise UnsupportedArchitecture(
            f"{family.activation_field} is {config.hidden_act!r}; known are {', '.join(sorted(_ACTIVATIONS))}. "
            "Use a checkpoint with one of these activations."
        )
    return _ACTIVATIONS[config.hidden_act]


def _attention_scale(family: Family, config: ModelConfig, fields: Fields) -> float:
    if family.has_unit_scale:
        return 1.0
    explicit = _optional(fields, family.scale_field)
    if explicit is not None:
        return explicit
    return (_optional(fields, family.inverse_root_scale_field) or config.head_dim) ** -0.5


def _embedding_scale(family: Family, config: ModelConfig, fields: Fields) -> float | None:
    if family.embedding_scale == "none":
        return _optional(fields, family.embedding_scale_field)
    root = sqrt(config.hidden_size)
    # Gemma 3 was trained with the rounded root, whatever the dtype it runs in.
    return root if family.embedding_scale == "root" else _rounded_to_bfloat16(root)


def _rounded_to_bfloat16(value: float) -> float:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", rounded))[0]


# ---- rope ------------------------------------------------------------------------------------------------------------


def _global_rope(family: Family, config: ModelConfig, fields: Fields, head_dim: int) -> RopePlan:
    scaling = config.rope_scaling or {}
    share = Fields(scaling, origin="the rope settings of config.json").number(
        "partial_rotary_factor", default=fields.number("partial_rotary_factor", default=1.0)
    )
    size = int(head_dim * share)
    if size < 2 or size % 2 or size > head_dim:
        raise UnsupportedArchitecture(
            f"head_dim {head_dim!r} times partial_rotary_factor {share!r} is {size}; rope needs an even number "
            "from 2 to head_dim. Correct config.json."
        )
    if fields.has("original_max_position_embeddings"):
        scaling = {"original_max_position_embeddings": fields.count("original_max_position_embeddings"), **scaling}
    if scaling.get("rope_type") == "proportional":
        # The share is of the frequencies: pairs are halves of the whole head, and the later ones do not turn.
        scaling, size = {**scaling, "partial_rotary_factor": share}, head_dim
    return RopePlan(
        size=size,
        base=config.rope_theta,
        scaling=None if config.rope_scaling is None else scaling,
        is_traditional=fields.flag("rope_traditional", default=family.is_rope_traditional),
    )


def _local_rope(family: Family, config: ModelConfig, fields: Fields, global_rope: RopePlan) -> RopePlan:
    size = global_rope.size if family.global_head_dim_field is None else config.head_dim
    return RopePlan(size=size, base=_local_base(fields), scaling=None, is_traditional=global_rope.is_traditional)


def _local_base(fields: Fields) -> float:
    nested = (fields.mapping("rope_parameters") or {}).get(SLIDING)
    if not isinstance(nested, dict):
        return fields.number("rope_local_base_freq", default=_LOCAL_BASE)
    settings = Fields(cast("dict[str, object]", nested), origin=f"{SLIDING!r} in config.json")
    kind = settings.text("rope_type", default="default")
    if kind != "default":
        raise UnsupportedArchitecture(
            f"rope_type of {SLIDING!r} is {kind!r}; windowed layers run an unscaled rope. Use another checkpoint."
        )
    return settings.number("rope_theta")


def _rope_indices(
    family: Family, config: ModelConfig, fields: Fields, windows: tuple[int | None, ...]
) -> tuple[int | None, ...]:
    if family.has_local_rope:
        return tuple(0 if window is None else 1 for window in windows)
    if not family.has_ropeless_layers:
        return (0,) * config.num_hidden_layers
    ropes = fields.values.get("no_rope_layers")
    if ropes is None:
        interval = fields.count("no_rope_layer_interval", default=4)
        return tuple(0 if (index + 1) % interval else None for index in range(config.num_hidden_layers))
    flags = cast("list[object]", ropes) if isinstance(ropes, list) else []
    if len(flags) != config.num_hidden_layers or any(flag not in (0, 1) for flag in flags):
        raise UnsupportedArchitecture(
            f"no_rope_layers is {ropes!r}; {config.num_hidden_layers} times 0 (no rope) or 1 is needed. "
            "Correct config.json."
        )
    return tuple(0 if flag else None for flag in flags)
