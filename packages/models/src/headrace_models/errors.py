"""Errors of the models package.

    ModelError(Exception)
    ├── SourceError(ValueError)            a name that leads to no model, or a folder that lacks a file
    ├── DownloadError(RuntimeError, OSError)   fetching failed; trying again may help
    ├── ChecksumMismatch(ValueError)       a file is not the one its sha256 names
    ├── UnsupportedArchitecture(ValueError)    no family here runs this model, or a setting of it
    ├── UnsupportedFormat(ValueError)      a file format, tensor type or tokenizer that is not read
    ├── WeightMismatch(ValueError)         weights lack, exceed or contradict what the configuration says
    └── TemplateError(ValueError)          the chat template refused or cannot render the messages

Each message says what is wrong, the value, what is accepted and the remedy.
"""

__all__ = [
    "ChecksumMismatch",
    "DownloadError",
    "ModelError",
    "SourceError",
    "TemplateError",
    "UnsupportedArchitecture",
    "UnsupportedFormat",
    "WeightMismatch",
]


class ModelError(Exception):
    """Base of every error this package raises on purpose."""


class SourceError(ModelError, ValueError):
    """The name leads to no model, or what it leads to lacks a file or a field."""


class DownloadError(ModelError, RuntimeError, OSError):
    """Fetching a model failed; the message says what to check before trying again."""


class ChecksumMismatch(ModelError, ValueError):
    """A file's sha256 is not the expected one, so it is not used."""


class UnsupportedArchitecture(ModelError, ValueError):
    """No family of this package runs the model, or one of its settings."""


class UnsupportedFormat(ModelError, ValueError):
    """A file format, tensor type or tokenizer that this package does not read."""


class WeightMismatch(ModelError, ValueError):
    """The weights lack, exceed or contradict what the configuration promises."""


class TemplateError(ModelError, ValueError):
    """The chat template refused the messages, or cannot be rendered."""
