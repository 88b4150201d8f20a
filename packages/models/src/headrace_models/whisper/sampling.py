"""Greedy decoding and sampling: each row takes its likeliest token, or draws one at its temperature."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import mlx.core as mx
from attrs import define, frozen

from headrace_models.whisper.drafts import Draft
from headrace_models.whisper.rows import Row, token_limit
from headrace_models.whisper.rules import RowRules
from headrace_models.whisper.seeds import keys, mix
from headrace_models.whisper.verifying import Verification

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from headrace_models.whisper.caches import DecoderState
    from headrace_models.whisper.decoded import DecodeRequest
    from headrace_models.whisper.model import WhisperModel
    from headrace_models.whisper.prefill import Prefilled

__all__ = ["sample"]


@frozen(eq=False)
class _Chosen:
    tokens: mx.array
    logprobs: mx.array

    def take(self, rows: Sequence[int]) -> _Chosen:
        picked = mx.array(list(rows))
        return _Chosen(self.tokens[picked], self.logprobs[picked])


def sample(model: WhisperModel, requests: Sequence[DecodeRequest], prefilled: Prefilled) -> list[list[Row]]:
    """Write all candidates of all windows to their ends.

    Returns:
        Per request its candidates.
    """
    count = requests[0].num_candidates
    rows = [
        Row(group, request, mix(request.seed, candidate), token_limit(model, request))
        for group, request in enumerate(requests)
        for candidate in range(count)
    ]
    state, logits = prefilled.state, prefilled.logits
    if count > 1:
        state.repeat(count)
        logits = mx.repeat(logits, count, axis=0)
    rules = RowRules.start(requests[0].rules, len(rows))
    if count == 1 and any(request.draft for request in requests) and not any(one.temperature for one in requests):
        Verification(model, state, rules, rows, [Draft(request.draft) for request in requests]).run(logits)
    else:
        _Sampling(model, state, rules, list(rows)).run(logits)
    return [[row for row in rows if row.group == group] for group in range(len(requests))]


@define(eq=False)
class _Sampling:
    """The loop over steps. On a GPU the next step is sent off before this one's tokens are read."""

    model: WhisperModel
    state: DecoderState
    rules: RowRules
    rows: list[Row]
    step: int = 0

    def run(self, logits: mx.array) -> None:
        chosen = self._choose(logits)
        while True:
            ahead = self._next(chosen) if self.model.on_gpu else None
            self._read(chosen)
            if all(row.is_done for row in self.rows):
                return
            chosen = self._next(chosen) if ahead is None else ahead
            chosen = self._drop_finished(chosen)

    def _next(self, chosen: _Chosen) -> _Chosen:
        lengths = [0 if row.is_done else 1 for row in self.rows]
        hidden = self.model.decoder.forward(chosen.tokens[:, None], self.state, lengths=lengths)
        return self._choose(self.model.decoder.logits(hidden[:, 0]))

    def _choose(self, logits: mx.array) -> _Chosen:
        masked = self.rules.apply(logits)
        tokens = masked.argmax(axis=-1)
        temperatures = [row.request.temperature for row in self.rows]
        if any(temperatures):
            warm = mx.array([max(temperature, 1e-6) for temperature in temperatures])[:, None]
            drawn = _draw(masked / warm, keys([mix(row.seed, self.step) for row in self.rows]))
            tokens = mx.where(mx.array(temperatures) > 0, drawn, tokens)
        logprobs = mx.take_along_axis(masked, tokens[:, None], axis=-1)[:, 0] - self.model.log_sum_exp(masked)
        self.rules.advance(tokens)
        self.step += 1
        mx.async_eval(tokens, logprobs)
        return _Chosen(tokens, logprobs)

    def _read(self, chosen: _Chosen) -> None:
        tokens = cast("list[int]", chosen.tokens.tolist())
        logprobs = cast("list[float]", chosen.logprobs.tolist())
        eot = self.model.tokenizer.special.eot
        for row, token, logprob in zip(self.rows, tokens, logprobs, strict=True):
            if not row.is_done:
                row.add(token, logprob, eot)

    def _drop_finished(self, chosen: _Chosen) -> _Chosen:
        """Leave windows out whose candidates are all done, once they are half of the batch: that copies the rest."""
        count = self.state.num_candidates
        num_groups = len(self.rows) // count
        live = [
            group
            for group in range(num_groups)
            if not all(row.is_done for row in self.rows[group * count : (group + 1) * count])
        ]
        if 2 * len(live) > num_groups:
            return chosen
        kept = [group * count + candidate for group in live for candidate in range(count)]
        self.state.keep(live)
        self.rules.take(kept)
        self.rows = [self.rows[row] for row in kept]
        return chosen.take(kept)


def _draw(logits: mx.array, row_keys: NDArray[np.uint32]) -> mx.array:
    def one(row: mx.array, key: mx.array) -> mx.array:
        return mx.random.categorical(row, key=key)

    return mx.vmap(one)(logits, mx.array(row_keys))
