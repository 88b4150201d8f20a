"""Whisper over HTTP on MLX: a dictation server that idles at tens of megabytes.

`create_transcription_server(options)` gives a server that listens and the service behind it. Public modules: `settings`
(the tree of settings), `reading` (flags, environment and file into that tree), `composition` (service, routes and
server from settings), `http_server`, `errors`. The command line is `headrace_transcription_server.cli.main`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_transcription_server.composition import create_transcription_server as create_transcription_server
    from headrace_transcription_server.errors import InvalidSetting as InvalidSetting
    from headrace_transcription_server.errors import TranscriptionServerError as TranscriptionServerError
    from headrace_transcription_server.http_server import TranscriptionServer as TranscriptionServer
    from headrace_transcription_server.reading import read_settings as read_settings
    from headrace_transcription_server.settings import TranscriptionSettings as TranscriptionSettings

__all__ = [
    "InvalidSetting",
    "TranscriptionServer",
    "TranscriptionServerError",
    "TranscriptionSettings",
    "create_transcription_server",
    "read_settings",
]

_MODULES = {
    "InvalidSetting": "errors",
    "TranscriptionServer": "http_server",
    "TranscriptionServerError": "errors",
    "TranscriptionSettings": "settings",
    "create_transcription_server": "composition",
    "read_settings": "reading",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
