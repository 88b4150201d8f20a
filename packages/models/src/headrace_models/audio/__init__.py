"""Audio in: files to samples at 16 kHz, and the errors of audio that is at fault. Imports no MLX.

`read_audio(source)` reads WAV exactly and everything else through PyAV, the extra `headrace-models[audio]`;
`find_speech(samples)` says where somebody speaks, the extra `headrace-models[vad]`.
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
    from headrace_models.audio.errors import VoiceDetectorMissing as VoiceDetectorMissing
    from headrace_models.audio.limits import AudioLimits as AudioLimits
    from headrace_models.audio.reading import read_audio as read_audio
    from headrace_models.audio.resampling import SAMPLE_RATE as SAMPLE_RATE
    from headrace_models.audio.speech import SpeechDetector as SpeechDetector
    from headrace_models.audio.speech import SpeechOptions as SpeechOptions
    from headrace_models.audio.speech import crop_to_speech as crop_to_speech
    from headrace_models.audio.speech import find_speech as find_speech
    from headrace_models.audio.speech import speech_spans as speech_spans

__all__ = [
    "AudioDecodeTimeout",
    "AudioError",
    "AudioLimits",
    "AudioTooLarge",
    "AudioTooLong",
    "AudioTooShort",
    "AudioUnreadable",
    "SAMPLE_RATE",
    "SpeechDetector",
    "SpeechOptions",
    "VoiceDetectorMissing",
    "crop_to_speech",
    "find_speech",
    "read_audio",
    "speech_spans",
]

_MODULES = {
    "AudioDecodeTimeout": "errors",
    "AudioError": "errors",
    "AudioLimits": "limits",
    "AudioTooLarge": "errors",
    "AudioTooLong": "errors",
    "AudioTooShort": "errors",
    "AudioUnreadable": "errors",
    "SAMPLE_RATE": "resampling",
    "SpeechDetector": "speech",
    "SpeechOptions": "speech",
    "VoiceDetectorMissing": "errors",
    "crop_to_speech": "speech",
    "find_speech": "speech",
    "read_audio": "reading",
    "speech_spans": "speech",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
