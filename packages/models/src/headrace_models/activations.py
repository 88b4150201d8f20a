"""Activation functions in the form that is fast on the machine.

On x86 CPUs MLX computes `exp`, `sigmoid` and `tanh` element by element; a power of e is 2.7 times faster there, and in
float32 nearer to the true value: relative errors up to 5e-7, against 9e-7. Far below zero the power overflows to
infinity and the result is 0.
"""

from __future__ import annotations

import math
import platform
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_models.family import Activation

__all__ = ["activation_of", "gelu", "gelu_tanh", "gelu_tanh_by_powers", "silu", "silu_by_powers"]

_SLOPE = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def silu(x: mx.array) -> mx.array:
    """Return `x * sigmoid(x)`."""
    return x * mx.sigmoid(x)


def silu_by_powers(x: mx.array) -> mx.array:
    """As `silu`; dtypes other than float32 take the plain form."""
    if x.dtype != mx.float32:
        return silu(x)
    return x / (mx.power(math.e, -x) + 1)


def gelu(x: mx.array) -> mx.array:
    """Return `x` times the normal distribution's cumulative density at x."""
    return x * (1 + mx.erf(x * math.sqrt(0.5))) / 2


def gelu_tanh(x: mx.array) -> mx.array:
    """As `gelu`, with the usual approximation by tanh, which is a sigmoid of twice its argument."""
    return x * mx.sigmoid(_steepened(x))


def gelu_tanh_by_powers(x: mx.array) -> mx.array:
    """As `gelu_tanh`; dtypes other than float32 take the plain form."""
    if x.dtype != mx.float32:
        return gelu_tanh(x)
    return x / (mx.power(math.e, -_steepened(x)) + 1)


def _steepened(x: mx.array) -> mx.array:
    return x * (_SLOPE + (_SLOPE * _CUBIC) * (x * x))


def activation_of(name: Activation, *, on_gpu: bool) -> Callable[[mx.array], mx.array]:
    """Return the function of a name.

    Args:
        on_gpu: never take the forms that suit an x86 CPU.
    """
    plain = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}
    by_powers = {"silu": silu_by_powers, "gelu": gelu, "gelu_tanh": gelu_tanh_by_powers}
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return (by_powers if is_x86 and not on_gpu else plain)[name]
