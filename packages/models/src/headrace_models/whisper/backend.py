"""The model as those see it who decide about windows; tests put a stub in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from attrs import frozen

from headrace_models.whisper.alignment import align_windows
from headrace_models.whisper.decoding import decode_windows
from headrace_models.whisper.prefill import detect_languages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace_models.whisper.alignment import AlignRequest, TimedWord
    from headrace_models.whisper.caches import AudioKeys
    from headrace_models.whisper.config import WhisperConfig
    from headrace_models.whisper.decoded import DecodedWindow, DecodeRequest, LanguageGuess
    from headrace_models.whisper.model import WhisperModel
    from headrace_models.whisper.tokenizer import WhisperTokenizer

__all__ = ["ModelBackend", "WindowBackend"]

_ENCODED_AT_ONCE = 4


class WindowBackend(Protocol):
    """What transcribing needs of a model."""

    @property
    def config(self) -> WhisperConfig: ...

    @property
    def tokenizer(self) -> WhisperTokenizer: ...

    def encode(self, mels: Sequence[NDArray[np.float32]]) -> list[AudioKeys]:
        """Encode log-mel windows `(2 * N, num_mels)` of equal length."""
        ...

    def detect(self, windows: Sequence[AudioKeys]) -> list[LanguageGuess]:
        """Tell the languages of windows of a multilingual model."""
        ...

    def decode(self, requests: Sequence[DecodeRequest]) -> list[DecodedWindow]:
        """Decode windows of equal batch keys."""
        ...

    def align(self, requests: Sequence[AlignRequest]) -> list[list[TimedWord]]:
        """Place the words of windows in time."""
        ...


@frozen(eq=False)
class ModelBackend:
    """A model's own way."""

    model: WhisperModel

    @property
    def config(self) -> WhisperConfig:
        return self.model.config

    @property
    def tokenizer(self) -> WhisperTokenizer:
        return self.model.tokenizer

    def encode(self, mels: Sequence[NDArray[np.float32]]) -> list[AudioKeys]:
        # A CPU gains nothing from several windows at once, and would hold their scores.
        step = _ENCODED_AT_ONCE if self.model.on_gpu else 1
        found: list[AudioKeys] = []
        for start in range(0, len(mels), step):
            keys = self.model.encode(np.stack(mels[start : start + step]))
            found += [keys.window(index) for index in range(keys.num_groups)] if keys.num_groups > 1 else [keys]
        return found

    def detect(self, windows: Sequence[AudioKeys]) -> list[LanguageGuess]:
        return detect_languages(self.model, windows)

    def decode(self, requests: Sequence[DecodeRequest]) -> list[DecodedWindow]:
        return decode_windows(self.model, requests)

    def align(self, requests: Sequence[AlignRequest]) -> list[list[TimedWord]]:
        return align_windows(self.model, requests)
