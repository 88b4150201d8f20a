"""Greedy decoding of rows that have drafts: what a row would write anyway is verified in one pass of the decoder.

After Leviathan, Kalman and Matias (2023), "Fast Inference from Transformers via Speculative Decoding", at temperature 0
and with an earlier transcript in place of a small model. The tokens and their probabilities are those of one token
after the other: a draft that is wrong costs time and changes nothing.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, cast

import mlx.core as mx
from attrs import define

from headrace_models.whisper.prefill import pad_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_models.whisper.caches import DecoderState
    from headrace_models.whisper.drafts import Draft
    from headrace_models.whisper.model import WhisperModel
    from headrace_models.whisper.rows import Row
    from headrace_models.whisper.rules import RowRules

__all__ = ["Verification"]


@define(eq=False)
class Verification:
    """Rows that are written to their ends, each with its draft.

    Attributes:
        rules: of the rows, which have written nothing.
    """

    model: WhisperModel
    state: DecoderState
    rules: RowRules
    rows: list[Row]
    drafts: list[Draft]

    def run(self, logits: mx.array) -> None:
        """Write all rows, from the logits `(R, V)` of what comes first."""
        self._take(logits[:, None], self.rules, [()] * len(self.rows))
        while not all(row.is_done for row in self.rows):
            proposals = [self._propose(row, draft) for row, draft in zip(self.rows, self.drafts, strict=True)]
            fed = [[*row.tokens[-1:], *proposed] for row, proposed in zip(self.rows, proposals, strict=True)]
            ends = self.state.ends
            hidden = self.model.decoder.forward(pad_ids(fed), self.state)
            ahead = self.rules.ahead(pad_ids(proposals))
            counts = self._take(self.model.decoder.logits(hidden), ahead, proposals)
            # What was fed beyond is written over.
            self.state.ends = [end + count for end, count in zip(ends, counts, strict=True)]

    def _propose(self, row: Row, draft: Draft) -> tuple[int, ...]:
        return () if row.is_done else draft.follow(row.tokens, row.limit - len(row.tokens) - 1)

    def _take(self, logits: mx.array, ahead: RowRules, proposals: Sequence[tuple[int, ...]]) -> list[int]:
        """Let each row write what its logits `(R, T, V)` say, as far as that is what was proposed, and one token more.

        Args:
            ahead: the rules of `R * T` rows, each behind one more of the proposed tokens than the one before.

        Returns:
            How many tokens each row wrote.
        """
        num_rows, width, _ = logits.shape
        masked = ahead.apply(logits.reshape(num_rows * width, -1))
        chosen = masked.argmax(axis=-1)
        logprobs = mx.take_along_axis(masked, chosen[:, None], axis=-1)[:, 0] - self.model.log_sum_exp(masked)
        mx.eval(chosen, logprobs)
        tokens = cast("list[list[int]]", chosen.reshape(num_rows, width).tolist())
        sums = cast("list[list[float]]", logprobs.reshape(num_rows, width).tolist())
        counts = [self._write(*each) for each in zip(self.rows, self.drafts, proposals, tokens, sums, strict=True)]
        places = [max(0, count - 1) for count in counts]
        ahead.take([row * width + place for row, place in enumerate(places)])
        ahead.advance(mx.array([each[place] for each, place in zip(tokens, places, strict=True)]))
        self.rules = ahead
        return counts

    def _write(
        self, row: Row, draft: Draft, proposed: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> int:
        if row.is_done:
            return 0
        agreed = takewhile(lambda pair: pair[0] == pair[1], zip(proposed, tokens, strict=False))
        count = 1 + sum(1 for _ in agreed)
        draft.note(count - 1)
        for token, logprob in zip(tokens[:count], logprobs, strict=False):
            if not row.is_done:
                row.add(token, logprob, self.model.tokenizer.special.eot)
        return count
