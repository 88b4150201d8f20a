"""Decodes windows as one batch: each row equals the same window alone, whatever else is in the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_models.whisper.beam import search
from headrace_models.whisper.decoded import DecodedWindow, compression_ratio, rank
from headrace_models.whisper.prefill import prefill
from headrace_models.whisper.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_models.whisper.decoded import DecodeRequest
    from headrace_models.whisper.model import WhisperModel

__all__ = ["decode_windows"]


def decode_windows(model: WhisperModel, requests: Sequence[DecodeRequest]) -> list[DecodedWindow]:
    """Decode windows in one batch.

    Args:
        requests: of equal `batch_key`, at least one.

    Raises:
        ValueError: their keys differ.
    """
    if len({request.batch_key for request in requests}) != 1:
        raise ValueError("the requests' batch keys differ, or there are none: decode them in batches of equal keys")
    prefilled = prefill(model, requests)
    beam = requests[0].beam
    if beam is not None:
        groups = search(model, requests, prefilled, beam)
        loops: list[list[int | None]] = [[None] * len(group) for group in groups]
    else:
        rows = sample(model, requests, prefilled)
        groups = [[(tuple(row.tokens), row.sum_logprob) for row in group] for group in rows]
        loops = [[row.loop_start for row in group] for group in rows]
    decoded: list[DecodedWindow] = []
    for request, group, loop, silent in zip(requests, groups, loops, prefilled.no_speech_probs, strict=True):
        best = rank(group, request.length_penalty)
        tokens, sum_logprob = group[best]
        text = model.tokenizer.decode(tokens).strip()
        decoded.append(
            DecodedWindow(
                tokens=tokens,
                text=text,
                avg_logprob=sum_logprob / (len(tokens) + 1),
                no_speech_prob=silent,
                temperature=request.temperature,
                compression_ratio=compression_ratio(text),
                loop_start=loop[best],
            )
        )
    return decoded
