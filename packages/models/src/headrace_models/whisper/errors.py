"""Errors of transcription.

ModelError(Exception)
├── InvalidTranscribeOption(ValueError)   an option, or options that exclude each other
└── UnknownLanguage(ValueError)           a language that the model was not trained on
"""

from headrace_models.errors import ModelError

__all__ = ["InvalidTranscribeOption", "UnknownLanguage"]


class InvalidTranscribeOption(ModelError, ValueError):
    """An option of a transcription is out of range, or two options exclude each other; the message names them."""


class UnknownLanguage(InvalidTranscribeOption):
    """The language is none that Whisper, or this model, knows."""
