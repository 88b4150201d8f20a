"""From a file's bytes to samples at 16 kHz: WAV exactly, everything else through PyAV, all within limits."""

from pathlib import Path
from typing import TYPE_CHECKING

from headrace_models.audio.containers import decode_container
from headrace_models.audio.errors import AudioTooLarge, AudioTooLong, AudioUnreadable
from headrace_models.audio.limits import AudioLimits
from headrace_models.audio.resampling import resample
from headrace_models.audio.wav import is_wav, read_wav

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["read_audio"]


def read_audio(source: bytes | Path, *, limits: AudioLimits | None = None) -> "NDArray[np.float32]":
    """Read audio as 16 kHz mono.

    Args:
        source: a file's content, or its path.
        limits: None means the defaults.

    Returns:
        `(N,)` float32, about -1 to 1.

    Raises:
        AudioTooLarge: more bytes than allowed.
        AudioTooLong: lasts longer than allowed.
        AudioDecodeTimeout: decoding takes longer than allowed.
        AudioUnreadable: empty, cut short, damaged, or of no form that is read here.
    """
    limits = limits or AudioLimits()
    data = _content(source, limits.max_bytes)
    found = read_wav(data) if is_wav(data) else None
    if found is None:
        return decode_container(data, max_duration_s=limits.max_duration_s, max_decode_s=limits.max_decode_s)
    samples, wav = found
    duration_s = len(samples) / wav.rate
    if duration_s > limits.max_duration_s:
        raise AudioTooLong(
            f"the audio lasts {duration_s:.0f} s; at most {limits.max_duration_s:g} s are taken: send it in parts."
        )
    return resample(samples, wav.rate)


def _content(source: bytes | Path, max_bytes: int) -> bytes:
    if isinstance(source, Path):
        try:
            # One byte more than allowed tells too much without reading it all.
            with source.open("rb") as file:
                data = file.read(max_bytes + 1)
        except OSError as error:
            raise AudioUnreadable(f"cannot read {str(source)!r}: {error.strerror or error}") from error
    else:
        data = source
    if len(data) > max_bytes:
        raise AudioTooLarge(f"the audio has more than {max_bytes} bytes, which is the limit: send it in parts.")
    if not data:
        raise AudioUnreadable("the audio is empty: send a file with sound.")
    return data
