"""Audio in: errors of audio that is at fault. Importing this package imports no MLX."""

from headrace_models.audio.errors import (
    AudioDecodeTimeout,
    AudioError,
    AudioTooLarge,
    AudioTooLong,
    AudioTooShort,
    AudioUnreadable,
)

__all__ = [
    "AudioDecodeTimeout",
    "AudioError",
    "AudioTooLarge",
    "AudioTooLong",
    "AudioTooShort",
    "AudioUnreadable",
]
