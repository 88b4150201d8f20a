"""Beam search as OpenAI's decoder does it (openai/whisper, `BeamSearchDecoder`), for several windows at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import mlx.core as mx
from attrs import define, field

from headrace_models.whisper.rows import token_limit
from headrace_models.whisper.rules import RowRules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_models.whisper.decoded import Beam, DecodeRequest
    from headrace_models.whisper.model import WhisperModel
    from headrace_models.whisper.prefill import Prefilled

__all__ = ["Candidate", "search"]

Candidate = tuple[tuple[int, ...], float]
"""Tokens without the end, and their summed log-probability."""


@define(eq=False)
class _Search:
    """One window's beam: sequences that go on, and finished ones."""

    beam: Beam
    limit: int
    live: list[Candidate]
    finished: dict[tuple[int, ...], float] = field(factory=dict[tuple[int, ...], float])

    @property
    def is_done(self) -> bool:
        return len(self.finished) >= self.beam.num_finished or len(self.live[0][0]) >= self.limit

    def extend(self, tokens: list[list[int]], logprobs: list[list[float]], eot: int) -> list[int]:
        """Take each row's likeliest next tokens and keep the best sequences.

        Returns:
            From which of the window's rows each one that goes on comes.
        """
        scores: dict[tuple[int, ...], float] = {}
        sources: dict[tuple[int, ...], int] = {}
        for source, (sequence, total) in enumerate(self.live):
            for token, logprob in zip(tokens[source], logprobs[source], strict=True):
                # Rows that are still equal, as all are at first, give equal sequences: they count once.
                scores[(*sequence, token)] = total + logprob
                sources[(*sequence, token)] = source
        kept: list[tuple[int, ...]] = []
        for sequence in sorted(scores, key=lambda found: scores[found], reverse=True):
            if len(kept) == self.beam.size:
                break
            if sequence[-1] != eot:
                kept.append(sequence)
            elif len(self.finished) < self.beam.num_finished:
                self.finished[sequence[:-1]] = scores[sequence]
        self.live = [(sequence, scores[sequence]) for sequence in kept]
        return [sources[sequence] for sequence in kept]

    def candidates(self) -> list[Candidate]:
        """Return what finished, and of the rest as many as the beam lacks."""
        found = list(self.finished.items())
        rest = sorted(self.live, key=lambda candidate: candidate[1], reverse=True)
        return found + rest[: max(0, self.beam.size - len(found))]


def search(
    model: WhisperModel, requests: Sequence[DecodeRequest], prefilled: Prefilled, beam: Beam
) -> list[list[Candidate]]:
    """Search all windows; a window whose search ends leaves the batch.

    Returns:
        Per request its candidates.
    """
    state, size, eot = prefilled.state, beam.size, model.tokenizer.special.eot
    state.repeat(size)
    logits = mx.repeat(prefilled.logits, size, axis=0)
    rules = RowRules.start(requests[0].rules, len(requests) * size)
    everyone = [_Search(beam, token_limit(model, request), [((), 0.0)] * size) for request in requests]
    searches = everyone
    while True:
        tokens, logprobs = _likeliest(model, rules.apply(logits), size + 1)
        sources = [
            index * size + source
            for index, one in enumerate(searches)
            for source in one.extend(
                tokens[index * size : (index + 1) * size], logprobs[index * size : (index + 1) * size], eot
            )
        ]
        state.reorder(sources)
        rules.take(sources)
        written = mx.array([sequence[-1] for one in searches for sequence, _ in one.live], mx.int32)
        rules.advance(written)
        live = [index for index, one in enumerate(searches) if not one.is_done]
        if not live:
            return [one.candidates() for one in everyone]
        if len(live) < len(searches):
            kept = [index * size + candidate for index in live for candidate in range(size)]
            state.keep(live)
            rules.take(kept)
            written = written[mx.array(kept)]
            searches = [searches[index] for index in live]
        logits = model.decoder.logits(model.decoder.forward(written[:, None], state)[:, 0])


def _likeliest(model: WhisperModel, masked: mx.array, count: int) -> tuple[list[list[int]], list[list[float]]]:
    """Return each row's likeliest tokens and their log-probabilities, best first."""
    logprobs = masked - model.log_sum_exp(masked)[:, None]
    picked = mx.argpartition(-logprobs, count - 1, axis=-1)[:, :count]
    values = mx.take_along_axis(logprobs, picked, axis=-1)
    order = mx.argsort(-values, axis=-1)
    picked, values = (mx.take_along_axis(array, order, axis=-1) for array in (picked, values))
    mx.eval(picked, values)
    return cast("list[list[int]]", picked.tolist()), cast("list[list[float]]", values.tolist())
