"""Frequencies of rotary embeddings: plain, and scaled for longer contexts (linear, llama3, YaRN, longrope)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import mlx.core as mx
from attrs import frozen

from headrace_models.errors import UnsupportedArchitecture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["RopeAngles", "rope_angles"]

_KINDS = ("default", "linear", "llama3", "longrope", "proportional", "su", "yarn")
_ORIGINAL_LLAMA3 = 8192
_ORIGINAL_YARN = 4096


@frozen
class RopeAngles:
    """What a rotary embedding turns by.

    Attributes:
        frequencies: angle per position of each pair of components.
        magnitude: factor of the rotated components of queries and keys.
    """

    frequencies: list[float]
    magnitude: float = 1.0


def rope_angles(
    size: int,
    base: float,
    scaling: Mapping[str, object] | None = None,
    *,
    max_positions: int | None = None,
    factors: Sequence[float] | None = None,
) -> RopeAngles:
    """Return the angles of a rotary embedding of `size` components.

    Long factors of a longrope are used at every position of a model whose context exceeds its original one: keys in a
    cache cannot change their factors when a sequence grows past it.

    Args:
        size: rotated components of a head, even.
        base: of the frequencies.
        scaling: `rope_scaling` of a `config.json`.
        max_positions: the model's context; stands in for a missing `original_max_position_embeddings`.
        factors: divisors of the frequencies, as a GGUF file carries them in `rope_freqs.weight`.

    Raises:
        UnsupportedArchitecture: for another scaling type, or one whose fields are missing.
    """
    frequencies = _plain_frequencies(size, base)
    if factors is not None:
        return RopeAngles(_divided(frequencies, factors, "rope_freqs.weight"))
    kind = _scaling_kind(scaling)
    if scaling is None or kind == "default":
        return RopeAngles(frequencies)
    if kind == "linear":
        factor = _number(scaling, "factor")
        return RopeAngles([frequency / factor for frequency in frequencies])
    if kind == "proportional":
        return RopeAngles(_proportional_frequencies(size, base, scaling))
    if kind == "llama3":
        return RopeAngles(_llama3_frequencies(frequencies, scaling, max_positions))
    if kind == "yarn":
        return RopeAngles(_yarn_frequencies(frequencies, base, scaling, max_positions), _yarn_magnitude(scaling))
    return _longrope(frequencies, scaling, max_positions)


def _plain_frequencies(size: int, base: float) -> list[float]:
    """Return base^(-2i/D), rounded as MLX's kernel rounds it.

    More exact ones move SmolLM2's logits by up to 1e-4 against every other program on MLX, and no nearer to float64.
    """
    num_pairs = size // 2
    exponents = mx.arange(num_pairs, dtype=mx.float32) * (-math.log(base) / num_pairs)
    return cast("list[float]", mx.exp(exponents).tolist())


def _proportional_frequencies(size: int, base: float, scaling: Mapping[str, object]) -> list[float]:
    """Turn the first share of a whole head's pairs, and the later ones not at all (Gemma 4)."""
    num_turning = int(size * _number(scaling, "partial_rotary_factor", 1.0)) // 2
    factor = _number(scaling, "factor", 1.0)
    turning = [frequency / factor for frequency in _plain_frequencies(size, base)[:num_turning]]
    return turning + [0.0] * (size // 2 - num_turning)


def _scaling_kind(scaling: Mapping[str, object] | None) -> str:
    if scaling is None:
        return "default"
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _KINDS:
        raise UnsupportedArchitecture(
            f"rope_scaling type {kind!r} is not supported; known types are {', '.join(_KINDS)}. "
            "Use a checkpoint without rope scaling of this type."
        )
    return str(kind)


def _number(scaling: Mapping[str, object], field: str, default: float | None = None) -> float:
    value = scaling.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UnsupportedArchitecture(
            f"rope_scaling.{field} is {value!r}; a number above 0 is needed. Correct the checkpoint's config.json."
        )
    return float(value)


def _divided(frequencies: Sequence[float], factors: object, field: str) -> list[float]:
    divisors = cast("Sequence[object]", factors) if isinstance(factors, list | tuple) else ()
    numbers = [float(each) for each in divisors if isinstance(each, int | float) and each > 0]
    if not len(numbers) == len(divisors) == len(frequencies):
        raise UnsupportedArchitecture(
            f"{field} does not hold {len(frequencies)} numbers above 0. Correct the checkpoint's configuration."
        )
    return [frequency / divisor for frequency, divisor in zip(frequencies, numbers, strict=True)]


def _llama3_frequencies(
    frequencies: Sequence[float], scaling: Mapping[str, object], max_positions: int | None
) -> list[float]:
    """Scale long wavelengths by `factor`, keep short ones, blend between (Llama 3.1, `rope_type: llama3`)."""
    factor = _number(scaling, "factor")
    low = _number(scaling, "low_freq_factor", 1.0)
    high = _number(scaling, "high_freq_factor", 4.0)
    context = _number(scaling, "original_max_position_embeddings", max_positions or _ORIGINAL_LLAMA3)

    def scaled(frequency: float) -> float:
        turns = context * frequency / (2 * math.pi)
        blend = 1.0 if high == low else min(max((turns - low) / (high - low), 0.0), 1.0)
        if turns <= low:
            blend = 0.0
        return frequency * (blend + (1 - blend) / factor)

    return [scaled(frequency) for frequency in frequencies]


def _yarn_frequencies(
    frequencies: Sequence[float], base: float, scaling: Mapping[str, object], max_positions: int | None
) -> list[float]:
    """Keep pairs that turn often within the original context, divide those that hardly turn, blend between."""
    size = 2 * len(frequencies)
    factor = _number(scaling, "factor")
    context = _number(scaling, "original_max_position_embeddings", max_positions or _ORIGINAL_YARN)

    def component(turns: float) -> float:
        return size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = component(_number(scaling, "beta_fast", 32.0)), component(_number(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    span = high - low if high != low else 0.001

    def scaled(index: int, frequency: float) -> float:
        divided = min(max((index - low) / span, 0.0), 1.0)
        return frequency * (1 - divided) + frequency / factor * divided

    return [scaled(index, frequency) for index, frequency in enumerate(frequencies)]


def _yarn_magnitude(scaling: Mapping[str, object]) -> float:
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    factor = _number(scaling, "factor")

    def magnitude(field: str, default: float) -> float:
        weight = scaling.get(field)
        weight = default if not isinstance(weight, int | float) else weight
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return magnitude("mscale", 1.0) / magnitude("mscale_all_dim", 0.0)


def _longrope(frequencies: Sequence[float], scaling: Mapping[str, object], max_positions: int | None) -> RopeAngles:
    """Divide each frequency by a factor of its own (Phi 3, `longrope` or `su`)."""
    original = _number(scaling, "original_max_position_embeddings")
    factor = max_positions / original if max_positions else _number(scaling, "factor")
    field = "long_factor" if factor > 1 else "short_factor"
    divided = _divided(frequencies, scaling.get(field), f"rope_scaling.{field}")
    if scaling.get("attention_factor") is not None:
        return RopeAngles(divided, _number(scaling, "attention_factor"))
    return RopeAngles(divided, 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original)))
