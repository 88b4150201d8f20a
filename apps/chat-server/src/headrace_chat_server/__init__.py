"""Headrace: a local OpenAI-compatible inference server for large language models on MLX.

Public modules: `settings` (the one tree of settings), `reading` (flags, environment and file into that tree),
`composition` (gateway, registry and application from settings), `engine_loader` (what the engine's process calls),
`errors`. The command line is `headrace_chat_server.cli.main`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_chat_server.composition import Composition as Composition
    from headrace_chat_server.composition import compose as compose
    from headrace_chat_server.engine_loader import EngineLoader as EngineLoader
    from headrace_chat_server.errors import ChatServerError as ChatServerError
    from headrace_chat_server.errors import InvalidSetting as InvalidSetting
    from headrace_chat_server.reading import read_settings as read_settings
    from headrace_chat_server.settings import Settings as Settings

__all__ = [
    "ChatServerError",
    "Composition",
    "EngineLoader",
    "InvalidSetting",
    "Settings",
    "compose",
    "read_settings",
]

_MODULES = {
    "ChatServerError": "errors",
    "Composition": "composition",
    "EngineLoader": "engine_loader",
    "InvalidSetting": "errors",
    "Settings": "settings",
    "compose": "composition",
    "read_settings": "reading",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
