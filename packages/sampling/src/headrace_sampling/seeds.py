"""Seeds and per-step keys of a row's randomness, as plain integers."""

import secrets

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = 2**64 - 1


def default_seed() -> int:
    """Draw a fresh seed of 53 bits from the operating system, so that equal prompts differ.

    53 bits survive JSON readers that keep numbers as doubles, so a reported seed can be sent back.
    """
    return secrets.randbits(53)


def mix_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index` of a request: the seed itself for choice 0, an unrelated one otherwise.

    The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    if index == 0:
        return seed & _MASK64
    mixed = (seed + index * _GOLDEN) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    return mixed ^ (mixed >> 31)


def step_key(seed: int, step: int) -> int:
    """Return the 64-bit key of one step: a function of the seed and the row's own step alone."""
    return (seed ^ ((step + 1) * _GOLDEN)) & _MASK64


def unit_interval(key: int) -> float:
    """Map a well-mixed 64-bit key to a number from 0 to below 1, uniformly."""
    return (key >> 11) / 2**53
