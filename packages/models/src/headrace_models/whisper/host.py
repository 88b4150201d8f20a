"""Softmax, GELU and sums of powers of a CPU's float32 arrays in numpy.

MLX's CPU library computes exponentials and error functions one by one, numpy several at once: a window's softmax takes
a seventh of the time, its GELU a tenth. Products stay in MLX, whose BLAS is the program's fast one. The arrays that
are overwritten were made here and are seen by nobody else.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from headrace_models.activations import gelu

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["attend", "attend_on_host", "gelu", "gelu_on_host", "log_sum_exp", "log_sum_exp_on_host"]

if TYPE_CHECKING:
    Attend = Callable[[mx.array, mx.array, mx.array], mx.array]
    """Attention of queries `(B, H, T, D)` to keys and values `(B, H, N, D)`, without a mask."""
    Activation = Callable[[mx.array], mx.array]
    LogSumExp = Callable[[mx.array], mx.array]
    """The logarithm of the sum of powers of e of each row: `(R, V)` to `(R,)`."""

# Below, handing arrays over costs more than it saves.
_FEWEST = 16_384
_BLOCK_ELEMENTS = 2**21
_SLICE_ELEMENTS = 2**16
_LEAST_EXPONENT = np.float32(-75)
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def attend(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """Attend without a mask, by MLX's fused kernel where the device has one."""
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=queries.shape[-1] ** -0.5)


def attend_on_host(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """As `attend`, for float32 on a CPU: evaluates what it is given."""
    rows, heads, count, size = queries.shape
    num_scores = count * keys.shape[2]
    if rows * heads * num_scores < _FEWEST:
        return attend(queries, keys, values)
    queries = (queries * size**-0.5).reshape(rows * heads, count, size)
    keys, values = (array.reshape(rows * heads, -1, size) for array in (keys, values))
    step = max(1, _BLOCK_ELEMENTS // num_scores)
    attended: list[mx.array] = []
    for start in range(0, rows * heads, step):
        block = slice(start, start + step)
        scores = queries[block] @ keys[block].swapaxes(-1, -2)
        _softmax_in_place(_view(scores))
        attended.append(scores @ values[block])
        mx.eval(attended[-1])
    return mx.concatenate(attended).reshape(rows, heads, count, size)


def gelu_on_host(x: mx.array) -> mx.array:
    """As `gelu`, within 4e-7, for float32 on a CPU: evaluates and overwrites what it is given."""
    if x.size < _FEWEST:
        return gelu(x)
    flat = _view(x).reshape(-1)
    for start in range(0, flat.size, _SLICE_ELEMENTS):
        _gelu_in_place(flat[start : start + _SLICE_ELEMENTS])
    return x


def log_sum_exp(logits: mx.array) -> mx.array:
    """Return `(R,)` of logits `(R, V)`, computed where the device does."""
    return mx.logsumexp(logits, axis=-1)


def log_sum_exp_on_host(logits: mx.array) -> mx.array:
    """As `log_sum_exp`, for float32 on a CPU: evaluates what it is given. Eight rows take a tenth of the time."""
    rows = _view(logits)
    highest = rows.max(axis=-1, keepdims=True)
    # A row of minus infinity alone has no finite highest to start from.
    highest = np.where(np.isfinite(highest), highest, np.float32(0))
    with np.errstate(divide="ignore"):
        return mx.array(np.log(np.exp(rows - highest).sum(axis=-1)) + highest[:, 0])


def _view(array: mx.array) -> NDArray[np.float32]:
    """Evaluate an array and see its memory: writing to the view changes the array."""
    mx.eval(array)
    return np.array(array, copy=False)


def _softmax_in_place(scores: NDArray[np.float32]) -> None:
    rows = scores.reshape(-1, scores.shape[-1])
    step = max(1, _SLICE_ELEMENTS // rows.shape[1])
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        block -= block.max(axis=-1, keepdims=True)
        # No denormal weights: a core multiplies many times slower with them.
        np.maximum(block, _LEAST_EXPONENT, out=block)
        np.exp(block, out=block)
        block *= 1 / block.sum(axis=-1, keepdims=True)


def _gelu_in_place(x: NDArray[np.float32]) -> None:
    """The error function by Abramowitz and Stegun's formula 7.1.26, off by at most 1.5e-7.

    What the normal distribution has beyond |x| is `tail`; GELU is x or 0, whichever is more, less |x| times it.
    """
    size = np.abs(x)
    t = size * np.float32(0.3275911 * sqrt(0.5))
    t += 1
    np.reciprocal(t, out=t)
    tail = t * np.float32(0.5 * _ERF[0])
    for coefficient in _ERF[1:]:
        tail += np.float32(0.5 * coefficient)
        tail *= t
    np.multiply(size, size, out=t)
    t *= np.float32(-0.5)
    # Smaller powers are denormal, and so would be the product: with such numbers a core multiplies many times slower.
    np.maximum(t, _LEAST_EXPONENT, out=t)
    tail *= np.exp(t, out=t)
    tail *= size
    np.maximum(x, 0, out=x)
    x -= tail
