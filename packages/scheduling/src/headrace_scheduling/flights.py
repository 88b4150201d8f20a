"""What a runner keeps of its rows, and of the steps that it has built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_sampling import RowSampling, TokenLogprobs
    from headrace_sampling.logprobs import StepLogprobs
    from headrace_scheduling.ports import RowContext
    from headrace_scheduling.prompt_scores import PromptScores
    from headrace_scheduling.row_grammar import RowGrammar
    from headrace_scheduling.steps import RowId


@define(eq=False)
class Row:
    """A row in its slot.

    Attributes:
        scores: of its prompt, until they are handed over.
        logprobs: captured, and not handed over.
        tokens, index: an array of a step's tokens, and where in it the row's last sampled one is.
    """

    row_id: RowId
    slot: int
    sampling: RowSampling
    context: RowContext | None
    grammar: RowGrammar | None = None
    scores: PromptScores | None = None
    logprobs: list[TokenLogprobs] = field(factory=list)
    tokens: mx.array | None = None
    index: int = 0

    def keep_logprobs(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Take what the sampling captured of an emitted token."""
        del token_id
        if logprobs is not None:
            self.logprobs.append(logprobs)


@define
class Flight:
    """A step that was built.

    Attributes:
        rows, hidden: the rows that sample, and their last hidden positions `(B, 1, D)` in parts.
        prefilled: hidden positions that are only computed.
        runs: the rows that fed forced tokens, and those of them that no step samples.
        has_prompts: whether it computes prompts.
        tokens: `(B,) int32`, once the step is launched and if any row samples.
        logprobs: of the rows that ask.
    """

    rows: list[Row]
    hidden: list[mx.array]
    prefilled: list[mx.array]
    runs: dict[RowId, tuple[int, ...]] = field(factory=dict)
    has_prompts: bool = False
    tokens: mx.array | None = None
    logprobs: StepLogprobs | None = None
    is_launched: bool = False

    @property
    def has_grammar(self) -> bool:
        return any(row.grammar is not None for row in self.rows)


def last_tokens(rows: Sequence[Row]) -> mx.array:
    """Return the rows' last sampled tokens `(B,)` without reading them."""
    source = rows[0].tokens
    if any(row.tokens is not source for row in rows):
        return mx.concatenate([_token_of(row) for row in rows])
    assert source is not None, "a row decodes only after its prompt"
    indices = [row.index for row in rows]
    if indices == list(range(source.shape[0])):
        return source
    return source[mx.array(indices)]


def _token_of(row: Row) -> mx.array:
    assert row.tokens is not None, "a row decodes only after its prompt"
    return row.tokens[row.index : row.index + 1]


def emitted(rows: Sequence[Row], values: Sequence[int]) -> dict[RowId, tuple[TokenLogprobs, ...]]:
    """Emit the tokens of the rows that capture, and return what was captured."""
    found: dict[RowId, tuple[TokenLogprobs, ...]] = {}
    for row, value in zip(rows, values, strict=True):
        if row.sampling.sampler.captures_logprobs:
            row.sampling.emit(value)
            found[row.row_id] = tuple(row.logprobs)
            row.logprobs.clear()
    return found


def scored(rows: Sequence[Row]) -> dict[RowId, tuple[TokenLogprobs, ...]]:
    """Hand over the scores of the prompts that have ended: each once, with its row's first token."""
    found: dict[RowId, tuple[TokenLogprobs, ...]] = {}
    for row in rows:
        if row.scores is not None:
            found[row.row_id], row.scores = row.scores.entries(), None
    return found
