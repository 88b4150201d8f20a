"""Where tokens are in the audio: the cross-attention of the alignment heads, warped (openai/whisper, `timing.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import mlx.core as mx
import numpy as np
from attrs import frozen

from headrace_models.whisper.caches import DecoderState, join_audio
from headrace_models.whisper.prefill import pad_ids
from headrace_models.whisper.warping import median_filter, warp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace_models.whisper.caches import AudioKeys
    from headrace_models.whisper.model import WhisperModel

__all__ = ["AlignRequest", "TimedWord", "align_windows"]

_MEDIAN_WIDTH = 7
_SECONDS_PER_POSITION = 0.02


@frozen(kw_only=True, eq=False)
class AlignRequest:
    """A window whose text is to be placed in time."""

    audio: AudioKeys
    """Of one window."""
    start: tuple[int, ...]
    """The tokens that start a transcript, without `<|notimestamps|>`."""
    text_tokens: tuple[int, ...]
    language: str | None
    num_positions: int
    """Of audio in the window, at least 1; the rest is padding."""


@frozen(kw_only=True)
class TimedWord:
    """A word with its tokens; times are seconds from the window's start."""

    text: str
    tokens: tuple[int, ...]
    start_s: float
    end_s: float
    probability: float


def align_windows(model: WhisperModel, requests: Sequence[AlignRequest]) -> list[list[TimedWord]]:
    """Place the words of windows in time, all windows in one pass of the decoder.

    Args:
        requests: at least one; all windows of the same number of encoder positions.
    """
    special = model.tokenizer.special
    sequences = [(*request.start, special.no_timestamps, *request.text_tokens, special.eot) for request in requests]
    state = DecoderState.empty(join_audio([request.audio for request in requests]))
    heads: dict[int, list[int]] = {}
    for layer, head in model.config.heads_to_align:
        heads.setdefault(layer, []).append(head)
    scores: list[mx.array] = []
    hidden = model.decoder.forward(pad_ids(sequences), state, heads=heads, scores=scores)
    together = mx.concatenate(scores, axis=1)
    found: list[list[TimedWord]] = []
    for row, (request, sequence) in enumerate(zip(requests, sequences, strict=True)):
        if not request.text_tokens:
            found.append([])
            continue
        first, last = len(request.start), len(sequence) - 1
        # Probabilities among text tokens alone, as OpenAI's.
        text_logits = model.decoder.logits(hidden[row, first : last - 1])[:, : special.eot]
        chosen = mx.array(request.text_tokens)[:, None]
        probabilities = mx.take_along_axis(mx.softmax(text_logits, axis=-1), chosen, axis=-1)[:, 0]
        matrix = _attention(together[row, :, : len(sequence), : request.num_positions])[first:last]
        found.append(_words(model, request, matrix, np.array(probabilities)))
    return found


def _attention(scores: mx.array) -> NDArray[np.float32]:
    """Average the heads' attention `(heads, T, N)`, normalized over tokens and smoothed over time: `(T, N)`."""
    weights = mx.softmax(scores, axis=-1)
    mean = weights.mean(axis=-2, keepdims=True)
    deviation = mx.sqrt(weights.var(axis=-2, keepdims=True))
    normalized = np.array((weights - mean) / mx.maximum(deviation, 1e-10))
    return cast("NDArray[np.float32]", median_filter(normalized, _MEDIAN_WIDTH).mean(axis=0))


def _words(
    model: WhisperModel, request: AlignRequest, matrix: NDArray[np.float32], probabilities: NDArray[np.float32]
) -> list[TimedWord]:
    rows, columns = warp(-matrix)
    # The column at which each row is entered.
    entered = columns[np.flatnonzero(np.diff(rows, prepend=-1))] * _SECONDS_PER_POSITION
    words: list[TimedWord] = []
    begin = 0
    for text, tokens in model.tokenizer.split_words(request.text_tokens, request.language):
        end = begin + len(tokens)
        words.append(
            TimedWord(
                text=text,
                tokens=tuple(tokens),
                start_s=float(entered[begin]),
                end_s=float(entered[end]),
                probability=float(probabilities[begin:end].mean()),
            )
        )
        begin = end
    return words
