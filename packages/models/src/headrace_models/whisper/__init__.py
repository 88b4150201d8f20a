"""Whisper on MLX: from audio to text with times.

`load_whisper(name)` gives a model, `transcribe(model, samples, options)` a `Transcription`, `transcribe_batch` several,
and a `Transcriber` goes step by step and takes audio in at any time. Importing this package imports no MLX.

One module per noun: `mel` (spectrograms), `config`, `sources`, `checkpoint` and `loading` (from files to a model),
`encoder`, `decoder` and `caches` (the network), `tokenizer` and `special` (text), `rules`, `sampling`, `beam` and
`decoding` (tokens of a window), `fallback` and `segmenting` (what becomes of them), `alignment` and `words` (times),
`takes` and `transcribing` (all windows of all audio).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_models.whisper.backend import WindowBackend as WindowBackend
    from headrace_models.whisper.config import WhisperConfig as WhisperConfig
    from headrace_models.whisper.decoded import DecodedWindow as DecodedWindow
    from headrace_models.whisper.decoded import DecodeRequest as DecodeRequest
    from headrace_models.whisper.decoding import decode_windows as decode_windows
    from headrace_models.whisper.errors import InvalidTranscribeOption as InvalidTranscribeOption
    from headrace_models.whisper.errors import UnknownLanguage as UnknownLanguage
    from headrace_models.whisper.languages import LANGUAGES as LANGUAGES
    from headrace_models.whisper.languages import language_code as language_code
    from headrace_models.whisper.loading import load_whisper as load_whisper
    from headrace_models.whisper.mel import log_mel as log_mel
    from headrace_models.whisper.model import WhisperModel as WhisperModel
    from headrace_models.whisper.options import TranscribeOptions as TranscribeOptions
    from headrace_models.whisper.results import Segment as Segment
    from headrace_models.whisper.results import Transcription as Transcription
    from headrace_models.whisper.results import VocabularyUse as VocabularyUse
    from headrace_models.whisper.results import Word as Word
    from headrace_models.whisper.rules import TokenRules as TokenRules
    from headrace_models.whisper.sources import WHISPER_INDEX_MODELS as WHISPER_INDEX_MODELS
    from headrace_models.whisper.sources import WhisperSource as WhisperSource
    from headrace_models.whisper.sources import resolve_whisper as resolve_whisper
    from headrace_models.whisper.tokenizer import WhisperTokenizer as WhisperTokenizer
    from headrace_models.whisper.transcribing import TakeEvent as TakeEvent
    from headrace_models.whisper.transcribing import Transcriber as Transcriber
    from headrace_models.whisper.transcribing import transcribe as transcribe
    from headrace_models.whisper.transcribing import transcribe_batch as transcribe_batch

__all__ = [
    "DecodeRequest",
    "DecodedWindow",
    "InvalidTranscribeOption",
    "LANGUAGES",
    "Segment",
    "TakeEvent",
    "TokenRules",
    "TranscribeOptions",
    "Transcriber",
    "Transcription",
    "UnknownLanguage",
    "VocabularyUse",
    "WHISPER_INDEX_MODELS",
    "WhisperConfig",
    "WhisperModel",
    "WhisperSource",
    "WhisperTokenizer",
    "WindowBackend",
    "Word",
    "decode_windows",
    "language_code",
    "load_whisper",
    "log_mel",
    "resolve_whisper",
    "transcribe",
    "transcribe_batch",
]

_MODULES = {
    "DecodeRequest": "decoded",
    "DecodedWindow": "decoded",
    "InvalidTranscribeOption": "errors",
    "LANGUAGES": "languages",
    "Segment": "results",
    "TakeEvent": "transcribing",
    "TokenRules": "rules",
    "TranscribeOptions": "options",
    "Transcriber": "transcribing",
    "Transcription": "results",
    "UnknownLanguage": "errors",
    "VocabularyUse": "results",
    "WHISPER_INDEX_MODELS": "sources",
    "WhisperConfig": "config",
    "WhisperModel": "model",
    "WhisperSource": "sources",
    "WhisperTokenizer": "tokenizer",
    "WindowBackend": "backend",
    "Word": "results",
    "decode_windows": "decoding",
    "language_code": "languages",
    "load_whisper": "loading",
    "log_mel": "mel",
    "resolve_whisper": "sources",
    "transcribe": "transcribing",
    "transcribe_batch": "transcribing",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
