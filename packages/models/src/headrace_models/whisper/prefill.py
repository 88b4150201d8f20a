"""The first step of a decoding: prompts of different lengths in one batch, and what the first logits tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import mlx.core as mx
from attrs import frozen

from headrace_models.whisper.caches import DecoderState, join_audio
from headrace_models.whisper.decoded import LanguageGuess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_models.whisper.caches import AudioKeys
    from headrace_models.whisper.decoded import DecodeRequest
    from headrace_models.whisper.model import WhisperModel

__all__ = ["Prefilled", "detect_languages", "pad_ids", "prefill"]


@frozen(kw_only=True, eq=False)
class Prefilled:
    """A batch that has read its prompts."""

    state: DecoderState
    logits: mx.array
    """`(G, V)` float32, of what comes after the prompts."""
    no_speech_probs: list[float]


def prefill(model: WhisperModel, requests: Sequence[DecodeRequest]) -> Prefilled:
    """Feed the requests' initial tokens, one row each."""
    state = DecoderState.empty(join_audio([request.audio for request in requests]))
    lengths = [len(request.initial) for request in requests]
    hidden = model.decoder.forward(pad_ids([request.initial for request in requests]), state, lengths=lengths)
    rows = mx.arange(len(requests))[:, None]
    # Only two positions of each row are scored: the start of the transcript, and the last.
    places = mx.array([[request.sot_index, length - 1] for request, length in zip(requests, lengths, strict=True)])
    logits = model.decoder.logits(hidden[rows, places])
    silent = mx.softmax(logits[:, 0], axis=-1)[:, model.tokenizer.special.no_speech]
    mx.eval(silent, logits)
    return Prefilled(state=state, logits=logits[:, 1], no_speech_probs=cast("list[float]", silent.tolist()))


def detect_languages(model: WhisperModel, windows: Sequence[AudioKeys]) -> list[LanguageGuess]:
    """Tell the language of windows by what the model would write after the start of a transcript."""
    special = model.tokenizer.special
    state = DecoderState.empty(join_audio(windows))
    hidden = model.decoder.forward(mx.full((len(windows), 1), special.sot, mx.int32), state)
    ids = mx.array(list(special.languages.values()))
    found = mx.softmax(model.decoder.logits(hidden[:, 0])[:, ids], axis=-1)
    guesses: list[LanguageGuess] = []
    for row in cast("list[list[float]]", found.tolist()):
        probabilities = dict(zip(special.languages, row, strict=True))
        best = max(probabilities, key=lambda code: probabilities[code])
        guesses.append(LanguageGuess(language=best, probability=probabilities[best], probabilities=probabilities))
    return guesses


def pad_ids(rows: Sequence[Sequence[int]]) -> mx.array:
    """Put rows of different lengths into `(R, T)`, padded on the right."""
    longest = max(map(len, rows))
    return mx.array([[*row, *[0] * (longest - len(row))] for row in rows], mx.int32)
