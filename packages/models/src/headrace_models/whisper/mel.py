"""Log-mel spectrograms as Whisper was trained on them (openai/whisper, `audio.py`), in numpy."""

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["FRAMES_PER_SECOND", "HOP_SAMPLES", "SAMPLE_RATE", "log_mel", "mel_filters"]

SAMPLE_RATE = 16_000
HOP_SAMPLES = 160
FRAMES_PER_SECOND = SAMPLE_RATE // HOP_SAMPLES

_FFT_SAMPLES = 400
_FLOOR = 1e-10
_RANGE = 8.0
_BLOCK_FRAMES = 4096

# Slaney's mel scale: linear up to 1 kHz, then 27 steps to 6.4 kHz by equal ratios.
_LINEAR_STEP_HZ = 200 / 3
_LOG_START_HZ = 1000.0
_LOG_START_MEL = _LOG_START_HZ / _LINEAR_STEP_HZ
_LOG_STEP = np.log(6.4) / 27


@lru_cache(maxsize=4)
def mel_filters(num_mels: int) -> "NDArray[np.float32]":
    """Return the filter bank `(num_mels, 201)`, float32: Slaney's scale and area norm from 0 to 8 kHz.

    Equals `librosa.filters.mel(sr=16000, n_fft=400, n_mels=num_mels)`, which Whisper's assets hold.
    """
    bins_hz = np.linspace(0, SAMPLE_RATE / 2, _FFT_SAMPLES // 2 + 1)
    edges_hz = _mel_to_hz(np.linspace(0, _hz_to_mel(SAMPLE_RATE / 2), num_mels + 2))
    widths = np.diff(edges_hz)[:, None]
    ramps = edges_hz[:, None] - bins_hz
    triangles = np.maximum(0, np.minimum(-ramps[:-2] / widths[:-1], ramps[2:] / widths[1:]))
    filters = (triangles * (2 / (edges_hz[2:] - edges_hz[:-2]))[:, None]).astype(np.float32)
    filters.setflags(write=False)
    return filters


def log_mel(samples: "NDArray[np.float32]", num_mels: int) -> "NDArray[np.float32]":
    """Return the log-mel spectrogram of audio, one frame per whole hop of 10 ms.

    Louder than 80 dB below the loudest frame counts; the loudest is taken over the whole audio, as OpenAI does.

    Args:
        samples: `(N,)` float32 at 16 kHz, about -1 to 1.
        num_mels: 80, or 128 of large-v3 and turbo.

    Returns:
        `(N // 160, num_mels)` float32, within about -1.5 to 1.5.
    """
    num_frames = len(samples) // HOP_SAMPLES
    # The frames that still reach into the audio count for the loudest, though they are not kept.
    num_computed = num_frames + 2
    half = _FFT_SAMPLES // 2
    last = (num_computed - 1) * HOP_SAMPLES + half
    padded = np.pad(samples, (0, max(0, last - len(samples), half + 1 - len(samples))))
    padded = np.concatenate([padded[half:0:-1], padded])
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FFT_SAMPLES)[::HOP_SAMPLES]
    logs = np.empty((num_computed, num_mels), np.float32)
    filters, window = mel_filters(num_mels).T, _window()
    for start in range(0, num_computed, _BLOCK_FRAMES):
        block = frames[start : min(start + _BLOCK_FRAMES, num_computed)]
        spectrum = np.fft.rfft(block * window, axis=-1)
        power = spectrum.real**2 + spectrum.imag**2
        logs[start : start + len(block)] = np.log10(np.maximum(power @ filters, _FLOOR))
    return ((np.maximum(logs[:num_frames], logs.max() - np.float32(_RANGE)) + 4) / 4).astype(np.float32)


def _window() -> "NDArray[np.float32]":
    # Periodic: one point more than needed, less the last.
    return np.hanning(_FFT_SAMPLES + 1)[:-1].astype(np.float32)


def _hz_to_mel(hz: float) -> float:
    return hz / _LINEAR_STEP_HZ if hz < _LOG_START_HZ else _LOG_START_MEL + np.log(hz / _LOG_START_HZ) / _LOG_STEP


def _mel_to_hz(mels: "NDArray[np.float64]") -> "NDArray[np.float64]":
    above = _LOG_START_HZ * np.exp(_LOG_STEP * (mels - _LOG_START_MEL))
    return np.where(mels < _LOG_START_MEL, mels * _LINEAR_STEP_HZ, above)
