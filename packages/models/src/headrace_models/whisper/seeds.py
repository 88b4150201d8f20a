"""Keys of random draws: of a seed and names alone, so that a row draws the same in any batch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["keys", "mix"]

_MASK = 2**64 - 1


def mix(*parts: int) -> int:
    """Mix numbers into one of 64 bits, by the finalizer of SplitMix64 (Steele et al. 2014)."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def keys(seeds: Sequence[int]) -> "NDArray[np.uint32]":
    """Return MLX's keys `(R, 2)` of 64-bit seeds."""
    return np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32)
