"""What decoding a window takes and gives: plain data between the decoder and those who decide about it."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from headrace_models.whisper.caches import AudioKeys
    from headrace_models.whisper.rules import TokenRules

__all__ = ["Beam", "DecodeRequest", "DecodedWindow", "LanguageGuess", "compression_ratio", "rank"]


@frozen(kw_only=True)
class Beam:
    """A beam search: how many rows go on, and how long it waits for finished ones (Kasai et al. 2022)."""

    size: int
    patience: float = 1.0

    @property
    def num_finished(self) -> int:
        """Finished candidates at which the search ends."""
        return max(1, round(self.size * self.patience))


@frozen(kw_only=True, eq=False)
class DecodeRequest:
    """One window to be decoded once."""

    audio: AudioKeys
    """Of one window."""
    initial: tuple[int, ...]
    """Prompt, start of the transcript and prefix."""
    sot_index: int
    """Where in `initial` the transcript starts."""
    rules: TokenRules
    temperature: float = 0.0
    beam: Beam | None = None
    num_candidates: int = 1
    """Samples of which the likeliest is taken; 1 with a beam."""
    length_penalty: float | None = None
    max_tokens: int | None = None
    seed: int = 0
    guard: bool = True
    """End a row that repeats itself."""
    draft: tuple[int, ...] = ()
    """What may be written; at temperature 0 without a beam it is verified in one pass, and changes but the time."""

    @property
    def batch_key(self) -> Hashable:
        """Requests of equal keys may be decoded as one batch."""
        return self.rules, self.beam, self.num_candidates, self.audio.num_positions


@frozen(kw_only=True)
class DecodedWindow:
    """What a window was decoded to."""

    tokens: tuple[int, ...]
    """Timestamps included, the end not."""
    text: str
    avg_logprob: float
    no_speech_prob: float
    temperature: float
    compression_ratio: float
    loop_start: int | None = None
    """Where `tokens` begin to repeat what they said; None when they do not."""

    @property
    def is_looped(self) -> bool:
        return self.loop_start is not None


@frozen(kw_only=True)
class LanguageGuess:
    """The likeliest language of a window."""

    language: str
    probability: float
    probabilities: dict[str, float] = field(factory=dict[str, float], repr=False)
    """Of all languages that the model knows."""


def compression_ratio(text: str) -> float:
    """Return how much smaller zlib makes the text; loops are above 2.4."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def rank(candidates: Sequence[tuple[Sequence[int], float]], length_penalty: float | None) -> int:
    """Return the likeliest candidate of (tokens, summed log-probability), normalized by length (Wu et al. 2016)."""

    def score(candidate: tuple[Sequence[int], float]) -> float:
        length = max(1, len(candidate[0]))
        return candidate[1] / (length if length_penalty is None else ((5 + length) / 6) ** length_penalty)

    return max(range(len(candidates)), key=lambda index: score(candidates[index]))
