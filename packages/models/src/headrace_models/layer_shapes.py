"""Sizes that may differ from layer to layer: heads, feed-forward, and whose keys and values a layer attends to."""

from typing import TYPE_CHECKING

from attrs import frozen

from headrace_models.errors import UnsupportedArchitecture
from headrace_models.fields import Fields
from headrace_models.windows import layer_windows

if TYPE_CHECKING:
    from headrace_models.config import ModelConfig
    from headrace_models.family import Family

__all__ = ["LayerShape", "PerLayerShape", "layer_shapes", "per_layer_shape"]


@frozen(kw_only=True)
class LayerShape:
    """Sizes of one layer.

    Attributes:
        head_dim: of queries, keys and values.
        num_kv_heads: heads of keys and of values.
        intermediate_size: of the feed-forward.
        source: the layer whose keys and values this one attends to; None if it makes and caches its own.
        has_values: whether values have a projection; otherwise the projected keys are the values too.
    """

    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    source: int | None = None
    has_values: bool = True


@frozen(kw_only=True)
class PerLayerShape:
    """Sizes of the inputs that every layer gets from the token itself.

    Attributes:
        size: of one layer's input.
        vocab_size: tokens that have such inputs.
    """

    size: int
    vocab_size: int


def layer_shapes(family: "Family", config: "ModelConfig") -> tuple[LayerShape, ...]:
    """Return the sizes of every layer.

    Raises:
        UnsupportedArchitecture: layers would share keys and values that no layer makes.
        SourceError: a setting is missing or has the wrong type.
    """
    fields = Fields(config.raw, origin="config.json")
    usual = LayerShape(
        head_dim=config.head_dim, num_kv_heads=config.num_key_value_heads, intermediate_size=config.intermediate_size
    )
    if family.global_head_dim_field is None:
        return (usual,) * config.num_hidden_layers
    windows = layer_windows(family, config, fields)
    full = _full_shape(family, fields, usual)
    own = [full if window is None else usual for window in windows]
    num_owning = config.num_hidden_layers - _num_sharing(family, config, fields)
    wide = 2 if family.wide_sharing_field is not None and fields.flag(family.wide_sharing_field) else 1
    return tuple(
        shape if index < num_owning else _sharing(shape, _source(windows, num_owning, index), wide)
        for index, shape in enumerate(own)
    )


def per_layer_shape(family: "Family", config: "ModelConfig") -> PerLayerShape | None:
    """Return the sizes of per-layer inputs; None for a model without them.

    Raises:
        SourceError: a setting is missing or has the wrong type.
    """
    if family.per_layer_size_field is None:
        return None
    fields = Fields(config.raw, origin="config.json")
    size = fields.count_or_zero(family.per_layer_size_field)
    if not size:
        return None
    vocab_size = fields.count("vocab_size_per_layer_input", default=config.vocab_size)
    return PerLayerShape(size=size, vocab_size=vocab_size)


def _full_shape(family: "Family", fields: Fields, usual: LayerShape) -> LayerShape:
    head_dim = fields.optional_count(family.global_head_dim_field or "") or usual.head_dim
    keys_are_values = family.keys_are_values_field is not None and fields.flag(
        family.keys_are_values_field, default=False
    )
    num_kv_heads = usual.num_kv_heads
    # Only models whose keys are their values have another number of them in full layers.
    if keys_are_values and family.global_kv_heads_field is not None:
        num_kv_heads = fields.count(family.global_kv_heads_field, default=num_kv_heads)
    return LayerShape(
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        intermediate_size=usual.intermediate_size,
        has_values=not keys_are_values,
    )


def _num_sharing(family: "Family", config: "ModelConfig", fields: Fields) -> int:
    if family.num_sharing_field is None:
        return 0
    count = fields.count_or_zero(family.num_sharing_field)
    if count >= config.num_hidden_layers:
        raise UnsupportedArchitecture(
            f"{family.num_sharing_field} is {count!r} of {config.num_hidden_layers} layers; at least one layer must "
            "make keys and values. Correct config.json."
        )
    return count


def _source(windows: tuple[int | None, ...], num_owning: int, index: int) -> int:
    """Return the last layer of the same kind that makes keys and values."""
    found = [other for other in range(num_owning) if windows[other] == windows[index]]
    if not found:
        raise UnsupportedArchitecture(
            f"layer {index} shares keys and values, but none of the first {num_owning} layers is of its kind. "
            "Correct layer_types or num_kv_shared_layers in config.json."
        )
    return found[-1]


def _sharing(shape: LayerShape, source: int, wide: int) -> LayerShape:
    return LayerShape(
        head_dim=shape.head_dim,
        num_kv_heads=shape.num_kv_heads,
        intermediate_size=shape.intermediate_size * wide,
        source=source,
    )
