"""Which layers see a sliding window, and how wide it is.

`layer_types` says so wherever a checkpoint has it. Without it, by the family's rule: `all` layers, `even` ones counted
from 0, `pattern` (all but every `sliding_window_pattern`-th, default 6), `upper` (from `max_window_layers` on, if
`use_sliding_window`), or none.
"""

from typing import TYPE_CHECKING, cast

from headrace_models.errors import UnsupportedArchitecture

if TYPE_CHECKING:
    from headrace_models.config import ModelConfig
    from headrace_models.family import Family
    from headrace_models.fields import Fields

__all__ = ["SLIDING", "layer_windows"]

SLIDING = "sliding_attention"
_FULL = "full_attention"


def layer_windows(family: "Family", config: "ModelConfig", fields: "Fields") -> tuple[int | None, ...]:
    """Return, per layer, the positions that a query sees, itself included; None for all.

    Args:
        fields: the configuration's settings.

    Raises:
        UnsupportedArchitecture: for kinds of layers that the family does not have.
        SourceError: for a setting of the wrong type.
    """
    sliding = _declared_types(config, fields)
    if sliding is None:
        sliding = [False] * config.num_hidden_layers
        if fields.has("sliding_window"):
            sliding = [_is_sliding(family, fields, index) for index in range(config.num_hidden_layers)]
    elif any(sliding) and family.windows == "none":
        raise UnsupportedArchitecture(
            f"layer_types has {SLIDING!r}; a {config.model_type!r} model attends fully in all layers. "
            "Use a checkpoint without sliding windows."
        )
    window = fields.count("sliding_window") if any(sliding) else None
    return tuple(window if is_sliding else None for is_sliding in sliding)


def _declared_types(config: "ModelConfig", fields: "Fields") -> list[bool] | None:
    types = fields.values.get("layer_types")
    if types is None:
        return None
    known = isinstance(types, list) and all(kind in (_FULL, SLIDING) for kind in cast("list[object]", types))
    if not known or len(cast("list[object]", types)) != config.num_hidden_layers:
        raise UnsupportedArchitecture(
            f"layer_types is {types!r}; {config.num_hidden_layers} times {_FULL!r} or {SLIDING!r} is needed. "
            "Use a checkpoint with these kinds of layers."
        )
    return [kind == SLIDING for kind in cast("list[object]", types)]


def _is_sliding(family: "Family", fields: "Fields", index: int) -> bool:
    match family.windows:
        case "none" | "layer_types":
            return False
        case "all":
            return True
        case "even":
            return index % 2 == 0
        case "pattern":
            return (index + 1) % _pattern(fields) != 0
        case "upper":
            return fields.flag("use_sliding_window", default=False) and index >= _num_lower_layers(fields)


def _num_lower_layers(fields: "Fields") -> int:
    value = fields.values.get("max_window_layers")
    if type(value) is not int or value < 0:
        raise UnsupportedArchitecture(
            f"max_window_layers is {value!r}; use_sliding_window needs an integer of at least 0. Correct config.json."
        )
    return value


def _pattern(fields: "Fields") -> int:
    # Newer configurations write it with an underscore, next to layer_types.
    return fields.count("sliding_window_pattern", default=fields.count("_sliding_window_pattern", default=6))
