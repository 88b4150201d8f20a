"""Sample rates changed to 16 kHz by a polyphase filter: a sinc in Kaiser's window, cut off below the Nyquist rate."""

from math import ceil, gcd
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SAMPLE_RATE", "resample"]

SAMPLE_RATE = 16_000

_ZERO_CROSSINGS = 32
_KAISER_BETA = 9.0
_ROLLOFF = 0.94


def resample(samples: "NDArray[np.float32]", rate: int) -> "NDArray[np.float32]":
    """Bring audio to 16 kHz; what lies above 7.5 kHz is taken out, and nothing is shifted in time.

    Args:
        samples: `(N,)` at `rate`.
        rate: samples per second.

    Returns:
        `(ceil(N * 16000 / rate),)` float32.
    """
    if rate == SAMPLE_RATE or not len(samples):
        return samples
    divisor = gcd(rate, SAMPLE_RATE)
    up, down = SAMPLE_RATE // divisor, rate // divisor
    cutoff = _ROLLOFF * min(1.0, up / down)
    half = ceil(_ZERO_CROSSINGS / cutoff)
    count = ceil(len(samples) * up / down)
    # Padded so that each output sees `half` inputs on either side.
    padded = np.pad(samples, (half, half + down + 1))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    found = np.empty(count, np.float32)
    for phase in range(min(up, count)):
        # Outputs of one phase lie equally between inputs, `down` inputs apart.
        first, rest = divmod(phase * down, up)
        number = len(range(phase, count, up))
        taps = _taps(half, rest / up, cutoff)
        found[phase::up] = windows[first::down][:number] @ taps
    return found


def _taps(half: int, fraction: float, cutoff: float) -> "NDArray[np.float32]":
    offsets = np.arange(-half, half + 1) - fraction
    window = np.i0(_KAISER_BETA * np.sqrt(np.maximum(0, 1 - (offsets / (half + 1)) ** 2))) / np.i0(_KAISER_BETA)
    taps = cutoff * np.sinc(cutoff * offsets) * window
    return (taps / taps.sum()).astype(np.float32)
