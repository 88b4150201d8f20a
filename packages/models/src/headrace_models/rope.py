"""Rotary position embedding in two forms that agree: precomputed angles, and MLX's fused kernel.

On CPU `mx.fast.rope` falls back to many small operations and computes the same angles again in every layer,
so `AngleRope` computes cosines and sines once per step. On GPUs the fused kernel is faster.
Half-split ("neox") layout, as Hugging Face checkpoints of the llama family have it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, cast

import mlx.core as mx
from attrs import define, frozen

from headrace_models.errors import UnsupportedArchitecture

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["AngleRope", "FusedRope", "Rope", "rope_frequencies"]


class Rope(Protocol):
    """A rotary embedding; `at` is called once per forward, its result once per layer."""

    def at(self, offset: int | mx.array, num_tokens: int, dtype: mx.Dtype) -> Callable[[mx.array], mx.array]:
        """Make the rotation of the positions `offset + [0, num_tokens)` for heads `(B, H, T, D)` of `dtype`.

        Args:
            offset: positions before the append, one for all rows or `(B,) int32`.
        """
        ...


def rope_frequencies(
    head_size: int,
    base: float,
    scaling: Mapping[str, object] | None = None,
    *,
    max_positions: int | None = None,
    factors: Sequence[float] | None = None,
) -> list[float]:
    """Return the angle per position of each of the `head_size / 2` pairs.

    Args:
        scaling: `rope_scaling` of a `config.json`; the types `default`, `linear` and `llama3` are known.
        max_positions: stands in for a missing `original_max_position_embeddings`.
        factors: divisors of the frequencies, as a GGUF file carries them in `rope_freqs.weight`.

    Raises:
        UnsupportedArchitecture: for another scaling type, or one whose fields are missing.
    """
    frequencies = _plain_frequencies(head_size, base)
    if factors is not None:
        return [frequency / factor for frequency, factor in zip(frequencies, factors, strict=True)]
    kind = _scaling_kind(scaling)
    if scaling is None or kind == "default":
        return frequencies
    if kind == "linear":
        factor = _number(scaling, "factor")
        return [frequency / factor for frequency in frequencies]
    return _llama3_frequencies(frequencies, scaling, max_positions)


def _plain_frequencies(head_size: int, base: float) -> list[float]:
    """Return base^(-2i/D), rounded as MLX's kernel rounds it.

    More exact ones move SmolLM2's logits by up to 1e-4 against every other program on MLX, and no nearer to float64.
    """
    num_pairs = head_size // 2
    exponents = mx.arange(num_pairs, dtype=mx.float32) * (-math.log(base) / num_pairs)
    return cast("list[float]", mx.exp(exponents).tolist())


def _scaling_kind(scaling: Mapping[str, object] | None) -> str:
    if scaling is None:
        return "default"
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedArchitecture(
            f"rope_scaling type {kind!r} is not supported; known types are 'default', 'linear' and 'llama3'. "
            "Use a checkpoint without rope scaling of this type."
        )
    return str(kind)


def _number(scaling: Mapping[str, object], field: str, default: float | None = None) -> float:
    value = scaling.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UnsupportedArchitecture(
            f"rope_scaling.{field} is {value!r}; a number above 0 is needed. Correct the checkpoint's config.json."
        )
    return float(value)


def _llama3_frequencies(
    frequencies: Sequence[float], scaling: Mapping[str, object], max_positions: int | None
) -> list[float]:
    """Scale long wavelengths by `factor`, keep short ones, blend between (Llama 3.1, `rope_type: llama3`)."""
    factor = _number(scaling, "factor")
    low = _number(scaling, "low_freq_factor", 1.0)
    high = _number(scaling, "high_freq_factor", 4.0)
    context = _number(scaling, "original_max_position_embeddings", max_positions or 8192)

    def scaled(frequency: float) -> float:
        turns = context * frequency / (2 * math.pi)
        blend = 1.0 if high == low else min(max((turns - low) / (high - low), 0.0), 1.0)
        if turns <= low:
            blend = 0.0
        return frequency * (blend + (1 - blend) / factor)

    return [scaled(frequency) for frequency in frequencies]


@define
class AngleRope:
    """Rotation by cosines and sines that are computed once per step and shared by all layers."""

    frequencies: mx.array
    """`(D/2,) float32`."""

    @classmethod
    def from_frequencies(cls, frequencies: Sequence[float]) -> AngleRope:
        """Make the rotation from what `rope_frequencies` returns."""
        return cls(mx.array(list(frequencies), dtype=mx.float32))

    def at(self, offset: int | mx.array, num_tokens: int, dtype: mx.Dtype) -> Callable[[mx.array], mx.array]:
        steps = mx.arange(num_tokens)
        positions = (steps + offset)[None] if isinstance(offset, int) else offset[:, None] + steps
        angles = positions.astype(mx.float32)[:, None, :, None] * self.frequencies
        cosines, sines = mx.cos(angles), mx.sin(angles)
        return _Rotation(
            mx.concatenate([cosines, cosines], axis=-1).astype(dtype),
            mx.concatenate([-sines, sines], axis=-1).astype(dtype),
        )


@define
class _Rotation:
    """One step's rotation: `cosines` and signed `sines`, both `(B or 1, 1, T, D)`."""

    cosines: mx.array
    sines: mx.array

    def __call__(self, heads: mx.array) -> mx.array:
        low, high = mx.split(heads, 2, axis=-1)
        return heads * self.cosines + mx.concatenate([high, low], axis=-1) * self.sines


@frozen
class FusedRope:
    """Rotation by `mx.fast.rope`, which takes one offset for all rows or one per row."""

    head_size: int
    wavelengths: mx.array
    """Reciprocal frequencies, `(D/2,) float32`, as the kernel wants them."""

    @classmethod
    def from_frequencies(cls, frequencies: Sequence[float]) -> FusedRope:
        """Make the rotation from what `rope_frequencies` returns."""
        wavelengths = mx.array([1.0 / frequency for frequency in frequencies], dtype=mx.float32)
        return cls(2 * len(frequencies), wavelengths)

    def at(self, offset: int | mx.array, num_tokens: int, dtype: mx.Dtype) -> Callable[[mx.array], mx.array]:
        del num_tokens, dtype  # the kernel reads both from the heads

        def rotate(heads: mx.array) -> mx.array:
            return mx.fast.rope(
                heads, self.head_size, traditional=False, base=None, scale=1.0, offset=offset, freqs=self.wavelengths
            )

        return rotate
