"""Which matrices become how many bits: defaults, recipes, and files with rules by module path. No arrays."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import cast

from attrs import frozen

from headrace_models.errors import SourceError, UnsupportedArchitecture

__all__ = ["BITS", "GROUP_SIZES", "RECIPES", "BitsRule", "Packing", "check_packing", "plan_packing", "read_bits_file"]

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
RECIPES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"mixed_2_6": (2, 6), "mixed_3_4": (3, 4), "mixed_3_6": (3, 6), "mixed_4_6": (4, 6)}
)
"""Bits of most matrices, and of those that llama.cpp's Q4_K_M keeps finer: names as mlx-lm's."""

_NONE = "none"
_MOST_OVERHEAD_BITS = 64


@frozen(kw_only=True)
class Packing:
    """How a matrix is packed: MLX's affine mode with so many bits, and a scale and offset per group of columns."""

    bits: int
    group_size: int

    @property
    def most_bits_per_weight(self) -> float:
        """With what a group's scale and offset add in float32."""
        return self.bits + _MOST_OVERHEAD_BITS / self.group_size


@frozen(kw_only=True)
class BitsRule:
    """What a module path that matches is packed to.

    Attributes:
        pattern: of a module path, such as `*.down_proj`; `*` also matches dots.
        bits: None leaves the module unpacked.
        group_size: None takes that of all.
    """

    pattern: str
    bits: int | None
    group_size: int | None = None


def check_packing(bits: int, group_size: int, *, origin: str = "") -> Packing:
    """Make a packing of numbers that MLX packs with.

    Raises:
        ValueError: naming the number and what is accepted.
    """
    for name, value, accepted in (("bits", bits, BITS), ("group_size", group_size, GROUP_SIZES)):
        if type(value) is not int or value not in accepted:
            raise ValueError(f"{name}{origin} is {value!r}; choose one of {', '.join(map(str, accepted))}.")
    return Packing(bits=bits, group_size=group_size)


def read_bits_file(path: Path) -> list[BitsRule]:
    """Read rules from a TOML file (`.toml`) or a JSON file.

    It holds an object from patterns to a number of bits, `"none"`, or an object with `bits` and maybe `group_size`.

    Raises:
        SourceError: the file cannot be read, or an entry has another form.
    """
    try:
        text = path.read_text("utf-8")
        values: object = tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except OSError as error:
        raise SourceError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        form = "TOML" if path.suffix.lower() == ".toml" else "JSON"
        raise SourceError(f"{str(path)!r} is not valid {form} ({error}): correct the file") from error
    if not isinstance(values, dict):
        raise SourceError(f"{str(path)!r} holds a {type(values).__name__}; an object from patterns to bits is expected")
    entries = cast("dict[str, object]", values)
    return [_rule(pattern, value, path) for pattern, value in entries.items()]


def _rule(pattern: str, value: object, path: Path) -> BitsRule:
    fields = cast("dict[str, object]", value) if isinstance(value, dict) else {"bits": value}
    unknown = sorted(fields.keys() - {"bits", "group_size"})
    bits, group_size = fields.get("bits"), fields.get("group_size")
    is_none = bits == _NONE and group_size is None
    accepts = (bits is None or type(bits) is int) and (group_size is None or type(group_size) is int)
    if unknown or bits is None or not (is_none or accepts):
        raise SourceError(
            f"{pattern!r} of {str(path)!r} is {value!r}; a number of bits, {_NONE!r} or an object with 'bits' and "
            f"'group_size' is expected. A pattern with dots needs quotes in TOML."
        )
    return BitsRule(
        pattern=pattern, bits=None if is_none else cast("int", bits), group_size=cast("int | None", group_size)
    )


def plan_packing(
    shapes: Mapping[str, tuple[int, ...]],
    packing: Packing,
    *,
    recipe: str | None = None,
    rules: Sequence[BitsRule] = (),
    num_layers: int,
) -> dict[str, Packing | None]:
    """Decide every matrix of a model, by module path; None leaves it unpacked.

    The last rule that matches decides; without one, the recipe; without that, `packing`. Matrices whose rows are no
    multiple of the group stay unpacked, unless a rule asks for them.

    Args:
        shapes: every tensor of the model.
        packing: of what nothing else decides; with a recipe, its group size alone counts.

    Raises:
        ValueError: a rule matches nothing, or asks for what MLX does not pack.
        UnsupportedArchitecture: the recipe does not fit the model, or nothing can be packed.
    """
    columns = {
        name.removesuffix(".weight"): shape[-1]
        for name, shape in shapes.items()
        if len(shape) > 1 and name.endswith(".weight")
    }
    plan = {path: _default(path, columns[path], packing, recipe, num_layers) for path in columns}
    if recipe is not None and not any("down_proj" in path for path in plan):
        raise UnsupportedArchitecture(
            f"recipe {recipe!r} needs matrices named down_proj; use a bits file for this model."
        )
    for rule in rules:
        matching = [path for path in plan if fnmatchcase(path, rule.pattern)]
        if not matching:
            raise ValueError(f"pattern {rule.pattern!r} matches no matrix; there are {', '.join(_kinds(plan))}.")
        plan |= {path: _ruled(rule, path, columns[path], packing) for path in matching}
    if not any(plan.values()):
        raise UnsupportedArchitecture(
            f"nothing would be packed: no matrix has rows that are a multiple of {packing.group_size}, or all are "
            "excluded. Choose a smaller group size, or export the model instead."
        )
    return plan


def _default(path: str, num_columns: int, packing: Packing, recipe: str | None, num_layers: int) -> Packing | None:
    if num_columns % packing.group_size:
        return None
    if recipe is None:
        return packing
    low, high = RECIPES[recipe]
    parts = path.split(".")
    index = int(parts[2]) if path.startswith("model.layers.") else 0
    eighth = num_layers // 8
    is_sensitive_layer = index < eighth or index >= 7 * num_layers // 8 or (index - eighth) % 3 == 2
    is_finer = "lm_head" in path or (is_sensitive_layer and ("v_proj" in path or "down_proj" in path))
    return Packing(bits=high if is_finer else low, group_size=packing.group_size)


def _ruled(rule: BitsRule, path: str, num_columns: int, packing: Packing) -> Packing | None:
    if rule.bits is None:
        return None
    wanted = check_packing(rule.bits, rule.group_size or packing.group_size, origin=f" of pattern {rule.pattern!r}")
    if num_columns % wanted.group_size:
        raise ValueError(
            f"pattern {rule.pattern!r} asks for groups of {wanted.group_size}, but {path} has rows of {num_columns}; "
            "choose a group size that divides it, or 'none'."
        )
    return wanted


def _kinds(plan: Mapping[str, object]) -> list[str]:
    """Name each kind of module once, with `*` for the layer."""
    return list(
        dict.fromkeys(
            f"model.layers.*.{path.split('.', 3)[3]}" if path.startswith("model.layers.") else path for path in plan
        )
    )
