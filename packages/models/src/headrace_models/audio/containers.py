"""Every other container and codec, through PyAV: decoded step by step, within limits, from memory alone."""

import time
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from headrace_models.audio.errors import AudioDecodeTimeout, AudioError, AudioTooLong, AudioUnreadable
from headrace_models.audio.resampling import SAMPLE_RATE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from numpy.typing import NDArray

__all__ = ["decode_container"]

# What is heard, and nothing that opens other files or addresses, such as playlists.
_FORMATS = (
    "aac,ac3,aiff,amr,amrnb,amrwb,asf,au,avi,caf,eac3,flac,flv,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,mpeg,mpegts,"
    "ogg,oga,opus,rm,tta,w64,wav,wv"
)
_SLACK_S = 1.0
_LOST_SHARE = 0.1


def decode_container(data: bytes, *, max_duration_s: float, max_decode_s: float) -> "NDArray[np.float32]":
    """Decode the first audio stream to 16 kHz mono.

    Args:
        data: the whole file.
        max_duration_s: of the audio.
        max_decode_s: that decoding may take.

    Returns:
        `(N,)` float32.

    Raises:
        AudioUnreadable: no audio that is read here, damaged, or cut short; or PyAV is not installed.
        AudioTooLong: the audio lasts longer.
        AudioDecodeTimeout: decoding takes longer.
    """
    try:
        import av
        from av.error import FFmpegError
    except ImportError as error:
        raise AudioUnreadable(
            "the audio is no WAV file, and PyAV, which decodes the rest, is missing: install headrace-models[audio]"
        ) from error
    deadline = time.monotonic() + max_decode_s
    blocks: list[NDArray[np.float32]] = []
    num_samples = 0
    try:
        with av.open(
            BytesIO(data), mode="r", options={"format_whitelist": _FORMATS, "protocol_whitelist": "none"}
        ) as container:
            if not container.streams.audio:
                raise AudioUnreadable("the file has no audio stream: send one that has.")
            stream = container.streams.audio[0]
            for block in _blocks(container, stream):
                blocks.append(block)
                num_samples += len(block)
                _check(num_samples, deadline, max_duration_s, max_decode_s)
            announced = _announced_s(container, stream)
    except AudioError:
        raise
    except (FFmpegError, ValueError, OverflowError, EOFError) as error:
        raise AudioUnreadable(f"the audio cannot be decoded ({error}): send a whole file of a common format") from error
    if not num_samples:
        raise AudioUnreadable("the file's audio stream is empty: record again.")
    found_s = num_samples / SAMPLE_RATE
    if announced is not None and found_s < announced * (1 - _LOST_SHARE) - _SLACK_S:
        raise AudioUnreadable(f"the audio is cut short: {announced:.1f} s are announced, {found_s:.1f} s are there.")
    return np.concatenate(blocks)


def _check(num_samples: int, deadline: float, max_duration_s: float, max_decode_s: float) -> None:
    if num_samples > max_duration_s * SAMPLE_RATE:
        raise AudioTooLong(f"the audio lasts longer than {max_duration_s:g} s, which is the limit: send it in parts.")
    if time.monotonic() > deadline:
        raise AudioDecodeTimeout(f"decoding the audio took longer than {max_decode_s:g} s: send a simpler format.")


def _blocks(container: "InputContainer", stream: "AudioStream") -> "Iterator[NDArray[np.float32]]":
    from av.audio.resampler import AudioResampler

    resampler = AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
    for frame in container.decode(stream):
        # A wrong time stamp is no reason to leave a hole or to fail.
        frame.pts = None
        for made in resampler.resample(frame):
            yield made.to_ndarray().reshape(-1).astype(np.float32, copy=False)
    for made in resampler.resample(None):
        yield made.to_ndarray().reshape(-1).astype(np.float32, copy=False)


def _announced_s(container: "InputContainer", stream: "AudioStream") -> float | None:
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    return None if container.duration is None else container.duration / 1_000_000
