"""Errors of audio that is read or heard.

    ModelError(Exception)
    ├── VoiceDetectorMissing(RuntimeError)   an extra is not installed
    └── AudioError(ValueError)      the audio is at fault, not the program: a client's error
        ├── AudioUnreadable         empty, cut short, damaged, or of no known form
        ├── AudioTooShort           less than can be heard
        ├── AudioTooLong            lasts longer than is allowed
        ├── AudioTooLarge           more bytes than are allowed
        └── AudioDecodeTimeout      decoding took longer than is allowed

Each message says what is wrong, the value, what is allowed and the remedy.
"""

from headrace_models.errors import ModelError

__all__ = [
    "AudioDecodeTimeout",
    "AudioError",
    "AudioTooLarge",
    "AudioTooLong",
    "AudioTooShort",
    "AudioUnreadable",
    "VoiceDetectorMissing",
]


class AudioError(ModelError, ValueError):
    """The audio is at fault; reading it again will not help."""


class AudioUnreadable(AudioError):
    """The audio is empty, cut short or damaged, or has no audio in it, or is of no known form."""


class AudioTooShort(AudioError):
    """The audio is shorter than anything that can be transcribed."""


class AudioTooLong(AudioError):
    """The audio lasts longer than the limit."""


class AudioTooLarge(AudioError):
    """The audio has more bytes than the limit."""


class AudioDecodeTimeout(AudioError):
    """Decoding the audio took longer than the limit."""


class VoiceDetectorMissing(ModelError, RuntimeError):
    """Speech cannot be found, because the package that finds it is not installed."""
