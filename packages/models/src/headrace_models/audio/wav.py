"""WAV files read exactly: PCM of 8 to 32 bits and floats, any number of channels, no library."""

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from headrace_models.audio.errors import AudioUnreadable

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["WavFormat", "is_wav", "read_wav"]

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_STREAMED = 0xFFFFFFFF
_SHORTEST_FORMAT = 16
_EXTENDED_FORMAT = 40
_RATES = range(1_000, 768_001)
_MAX_CHANNELS = 64


@frozen(kw_only=True)
class WavFormat:
    """What a WAV file's samples are."""

    kind: int
    """1 of PCM, 3 of floats."""
    num_channels: int
    rate: int
    bits: int

    @property
    def frame_bytes(self) -> int:
        return self.num_channels * self.bits // 8


def is_wav(data: bytes | memoryview) -> bool:
    """Return whether data says that it is a WAV file."""
    return bytes(data[:4]) == b"RIFF" and bytes(data[8:12]) == b"WAVE"


def read_wav(data: bytes | memoryview) -> tuple["NDArray[np.float32]", WavFormat] | None:
    """Read a WAV file's samples, mixed down to one channel.

    A size of 0xFFFFFFFF, as programs write that do not know theirs yet, means up to the end.

    Returns:
        `(N,)` float32 within -1 to 1 (floats as they are), and the format; None if it holds something else than PCM or
        floats, which needs a decoder.

    Raises:
        AudioUnreadable: the file is cut short, damaged, or holds no samples.
    """
    view = memoryview(data)
    wav: WavFormat | None = None
    for name, body, size in _chunks(view):
        if name == b"fmt ":
            wav = _format(body)
            if wav is None:
                return None
        elif name == b"data":
            if wav is None:
                raise AudioUnreadable("the WAV file has samples before their format: save it again.")
            if size != _STREAMED and len(body) < size:
                raise AudioUnreadable(
                    f"the WAV file is cut short: it announces {size} bytes of samples and has {len(body)}: send all."
                )
            return _samples(body, wav), wav
    raise AudioUnreadable("the WAV file holds no samples: save it again.")


def _chunks(view: memoryview) -> Iterator[tuple[bytes, memoryview, int]]:
    """Yield name, as much as there is of the body, and announced size of each chunk."""
    offset = 12
    while offset + 8 <= len(view):
        name, size = struct.unpack_from("<4sI", view, offset)
        yield name, view[offset + 8 : offset + 8 + size], size
        offset += 8 + size + size % 2


def _format(body: memoryview) -> WavFormat | None:
    if len(body) < _SHORTEST_FORMAT:
        raise AudioUnreadable(f"the WAV file's format has {len(body)} bytes; at least {_SHORTEST_FORMAT} are needed.")
    kind, num_channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", body)
    if kind == _EXTENSIBLE and len(body) >= _EXTENDED_FORMAT:
        (kind,) = struct.unpack_from("<H", body, 24)
    if (kind == _PCM and bits not in (8, 16, 24, 32)) or (kind == _FLOAT and bits not in (32, 64)):
        return None
    if kind not in (_PCM, _FLOAT):
        return None
    if rate not in _RATES or not 1 <= num_channels <= _MAX_CHANNELS or block != num_channels * bits // 8:
        raise AudioUnreadable(
            f"the WAV file says {num_channels} channels, {rate} Hz and {block} bytes per frame of {bits} bits, which "
            "do not belong together or are none that audio has: save it again."
        )
    return WavFormat(kind=kind, num_channels=num_channels, rate=rate, bits=bits)


def _samples(body: memoryview, wav: WavFormat) -> "NDArray[np.float32]":
    count = len(body) // wav.frame_bytes
    if not count:
        raise AudioUnreadable("the WAV file holds no samples: record again.")
    raw = body[: count * wav.frame_bytes]
    if wav.kind == _FLOAT:
        values = np.frombuffer(raw, f"<f{wav.bits // 8}").astype(np.float32)
    elif wav.bits == 8:
        values = (np.frombuffer(raw, np.uint8).astype(np.float32) - 128) / 128
    elif wav.bits == 24:
        # Three bytes on top of an empty one: 32-bit numbers of the same share of full scale.
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        values = wide.view("<i4")[:, 0].astype(np.float32) / 2**31
    else:
        values = np.frombuffer(raw, f"<i{wav.bits // 8}").astype(np.float32) / 2 ** (wav.bits - 1)
    values = values.astype(np.float32, copy=False)
    if wav.num_channels == 1:
        return values
    return values.reshape(-1, wav.num_channels).mean(axis=1, dtype=np.float32)
