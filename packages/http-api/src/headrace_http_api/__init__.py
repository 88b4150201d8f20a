"""OpenAI-compatible HTTP API for local inference: wire formats, routes and event streams.

Public modules: app, audio, audio_ports, chat, completions, config, curves, disconnect, engine_stats, error_table,
errors, json_body, middleware, models, observability, openapi_document, parsing, ports, services, sse, tokens,
validation. Only chat, completions, curves, tokens and openapi_document, and dialect and generation below them, need
the extra `chat` (scheduling and sampling).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_http_api.app import create_app as create_app
    from headrace_http_api.audio import AudioServices as AudioServices
    from headrace_http_api.audio import SessionRegistry as SessionRegistry
    from headrace_http_api.audio import create_audio_app as create_audio_app
    from headrace_http_api.audio_ports import Pcm as Pcm
    from headrace_http_api.audio_ports import SpeechFilter as SpeechFilter
    from headrace_http_api.audio_ports import Transcriber as Transcriber
    from headrace_http_api.audio_ports import TranscriptionOptions as TranscriptionOptions
    from headrace_http_api.config import LOOPBACK_HOSTS as LOOPBACK_HOSTS
    from headrace_http_api.config import ApiConfig as ApiConfig
    from headrace_http_api.engine_stats import model_stats as model_stats
    from headrace_http_api.engine_stats import readiness_of as readiness_of
    from headrace_http_api.errors import ApiError as ApiError
    from headrace_http_api.errors import ClientDisconnected as ClientDisconnected
    from headrace_http_api.errors import Forbidden as Forbidden
    from headrace_http_api.errors import InvalidRequest as InvalidRequest
    from headrace_http_api.errors import ModelNotFound as ModelNotFound
    from headrace_http_api.errors import ModelUnavailable as ModelUnavailable
    from headrace_http_api.errors import NotAuthenticated as NotAuthenticated
    from headrace_http_api.errors import NotFound as NotFound
    from headrace_http_api.errors import PayloadTooLarge as PayloadTooLarge
    from headrace_http_api.errors import SessionClosed as SessionClosed
    from headrace_http_api.errors import TooManySessions as TooManySessions
    from headrace_http_api.errors import UnsupportedMediaType as UnsupportedMediaType
    from headrace_http_api.errors import UnsupportedParameter as UnsupportedParameter
    from headrace_http_api.observability import METRIC_NAMES as METRIC_NAMES
    from headrace_http_api.observability import STATS_KEYS as STATS_KEYS
    from headrace_http_api.openapi_document import openapi as openapi
    from headrace_http_api.parsing.families import ToolFamily as ToolFamily
    from headrace_http_api.parsing.families import find_family as find_family
    from headrace_http_api.parsing.parts import ContentDelta as ContentDelta
    from headrace_http_api.parsing.parts import OutputParser as OutputParser
    from headrace_http_api.parsing.parts import ParsedReply as ParsedReply
    from headrace_http_api.parsing.parts import ReasoningDelta as ReasoningDelta
    from headrace_http_api.parsing.parts import ToolArgumentsDelta as ToolArgumentsDelta
    from headrace_http_api.parsing.parts import ToolCall as ToolCall
    from headrace_http_api.parsing.parts import ToolCallEnd as ToolCallEnd
    from headrace_http_api.parsing.parts import ToolCallStart as ToolCallStart
    from headrace_http_api.parsing.parts import parse_all as parse_all
    from headrace_http_api.parsing.selection import select_parser as select_parser
    from headrace_http_api.parsing.selection import visible_tokens as visible_tokens
    from headrace_http_api.parsing.tool_format import ToolFormat as ToolFormat
    from headrace_http_api.ports import ChatCodec as ChatCodec
    from headrace_http_api.ports import Gateway as Gateway
    from headrace_http_api.ports import Generation as Generation
    from headrace_http_api.ports import ModelCard as ModelCard
    from headrace_http_api.ports import ModelRegistry as ModelRegistry
    from headrace_http_api.ports import ModelStats as ModelStats
    from headrace_http_api.ports import PreparedPrompt as PreparedPrompt
    from headrace_http_api.ports import Readiness as Readiness
    from headrace_http_api.ports import SamplingDefaults as SamplingDefaults
    from headrace_http_api.ports import ServedConfig as ServedConfig
    from headrace_http_api.ports import ServedModel as ServedModel
    from headrace_http_api.services import ApiServices as ApiServices
    from headrace_http_api.services import ServerInfo as ServerInfo

__all__ = [
    "ApiConfig",
    "ApiError",
    "ApiServices",
    "AudioServices",
    "ChatCodec",
    "ClientDisconnected",
    "ContentDelta",
    "Forbidden",
    "Gateway",
    "Generation",
    "InvalidRequest",
    "LOOPBACK_HOSTS",
    "METRIC_NAMES",
    "ModelCard",
    "ModelNotFound",
    "ModelRegistry",
    "ModelStats",
    "ModelUnavailable",
    "NotAuthenticated",
    "NotFound",
    "OutputParser",
    "ParsedReply",
    "PayloadTooLarge",
    "Pcm",
    "PreparedPrompt",
    "Readiness",
    "ReasoningDelta",
    "STATS_KEYS",
    "SamplingDefaults",
    "ServedConfig",
    "ServedModel",
    "ServerInfo",
    "SessionClosed",
    "SessionRegistry",
    "SpeechFilter",
    "TooManySessions",
    "ToolArgumentsDelta",
    "ToolCall",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolFamily",
    "ToolFormat",
    "Transcriber",
    "TranscriptionOptions",
    "UnsupportedMediaType",
    "UnsupportedParameter",
    "create_app",
    "create_audio_app",
    "find_family",
    "model_stats",
    "openapi",
    "parse_all",
    "readiness_of",
    "select_parser",
    "visible_tokens",
]

_MODULES = {
    "ApiConfig": "config",
    "ApiError": "errors",
    "ApiServices": "services",
    "AudioServices": "audio",
    "ChatCodec": "ports",
    "ClientDisconnected": "errors",
    "ContentDelta": "parsing.parts",
    "Forbidden": "errors",
    "Gateway": "ports",
    "Generation": "ports",
    "InvalidRequest": "errors",
    "LOOPBACK_HOSTS": "config",
    "METRIC_NAMES": "observability",
    "ModelCard": "ports",
    "ModelNotFound": "errors",
    "ModelRegistry": "ports",
    "ModelStats": "ports",
    "ModelUnavailable": "errors",
    "NotAuthenticated": "errors",
    "NotFound": "errors",
    "OutputParser": "parsing.parts",
    "ParsedReply": "parsing.parts",
    "PayloadTooLarge": "errors",
    "Pcm": "audio_ports",
    "PreparedPrompt": "ports",
    "Readiness": "ports",
    "ReasoningDelta": "parsing.parts",
    "STATS_KEYS": "observability",
    "SamplingDefaults": "ports",
    "ServedConfig": "ports",
    "ServedModel": "ports",
    "ServerInfo": "services",
    "SessionClosed": "errors",
    "SessionRegistry": "audio",
    "SpeechFilter": "audio_ports",
    "TooManySessions": "errors",
    "ToolArgumentsDelta": "parsing.parts",
    "ToolCall": "parsing.parts",
    "ToolCallEnd": "parsing.parts",
    "ToolCallStart": "parsing.parts",
    "ToolFamily": "parsing.families",
    "ToolFormat": "parsing.tool_format",
    "Transcriber": "audio_ports",
    "TranscriptionOptions": "audio_ports",
    "UnsupportedMediaType": "errors",
    "UnsupportedParameter": "errors",
    "create_app": "app",
    "create_audio_app": "audio",
    "find_family": "parsing.families",
    "model_stats": "engine_stats",
    "openapi": "openapi_document",
    "parse_all": "parsing.parts",
    "readiness_of": "engine_stats",
    "select_parser": "parsing.selection",
    "visible_tokens": "parsing.selection",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
