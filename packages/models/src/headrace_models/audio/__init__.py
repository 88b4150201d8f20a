"""Audio in: files to samples at 16 kHz, and the errors of audio that is at fault. Imports no MLX.

`read_audio(source)` reads WAV exactly and everything else through PyAV, the extra `headrace-models[audio]`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_models.audio.errors import AudioDecodeTimeout as AudioDecodeTimeout
    from headrace_models.audio.errors import AudioError as AudioError
    from headrace_models.audio.errors import AudioTooLarge as AudioTooLarge
    from headrace_models.audio.errors import AudioTooLong as AudioTooLong
    from headrace_models.audio.errors import AudioTooShort as AudioTooShort
    from headrace_models.audio.errors import AudioUnreadable as AudioUnreadable
    from headrace_models.audio.reading import AudioLimits as AudioLimits
    from headrace_models.audio.reading import read_audio as read_audio
    from headrace_models.audio.resampling import SAMPLE_RATE as SAMPLE_RATE

__all__ = [
    "AudioDecodeTimeout",
    "AudioError",
    "AudioLimits",
    "AudioTooLarge",
    "AudioTooLong",
    "AudioTooShort",
    "AudioUnreadable",
    "SAMPLE_RATE",
    "read_audio",
]

_MODULES = {
    "AudioDecodeTimeout": "errors",
    "AudioError": "errors",
    "AudioLimits": "reading",
    "AudioTooLarge": "errors",
    "AudioTooLong": "errors",
    "AudioTooShort": "errors",
    "AudioUnreadable": "errors",
    "SAMPLE_RATE": "resampling",
    "read_audio": "reading",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
