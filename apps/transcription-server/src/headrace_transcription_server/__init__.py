"""Whisper over HTTP on MLX: a dictation server that idles at tens of megabytes.

Public modules: `settings` (the tree of settings and how it is read), `errors`. The command line is
`headrace_transcription_server.cli.main`. This version reads its settings; transcription itself is a later release.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_transcription_server.errors import InvalidSetting as InvalidSetting
    from headrace_transcription_server.errors import TranscriptionServerError as TranscriptionServerError
    from headrace_transcription_server.errors import TranscriptionUnavailable as TranscriptionUnavailable
    from headrace_transcription_server.settings import TranscriptionSettings as TranscriptionSettings

__all__ = ["InvalidSetting", "TranscriptionServerError", "TranscriptionSettings", "TranscriptionUnavailable"]

_MODULES = {
    "InvalidSetting": "errors",
    "TranscriptionServerError": "errors",
    "TranscriptionSettings": "settings",
    "TranscriptionUnavailable": "errors",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
