"""The sampling chain of a fixed set of rows: parameters laid out as arrays once, applied every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import frozen

from headrace_sampling.draws import CurveDraw, PlainDraw
from headrace_sampling.layout import row_replacement, sigma_filter, uses_top_p, uses_typical
from headrace_sampling.logprobs import StepLogprobs
from headrace_sampling.processors import Processors, changes_logits
from headrace_sampling.ranked import FEW_CANDIDATES, NUM_CANDIDATES, RankedDraw, is_bounded
from headrace_sampling.setup import check_vocabulary

if TYPE_CHECKING:
    from headrace_sampling.params import SamplingParams
    from headrace_sampling.setup import RowSetup


@frozen(kw_only=True)
class SampledStep:
    """What one step picked.

    Attributes:
        tokens: `(B,) int32`.
        logprobs: those of rows that capture them; None if no row does.
    """

    tokens: mx.array
    logprobs: StepLogprobs | None = None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """What to evaluate together, so that reading tokens and log-probabilities waits once."""
        return (self.tokens,) if self.logprobs is None else (self.tokens, *self.logprobs.arrays)


Draw = Callable[[mx.array, Sequence[int]], mx.array]

_LARGEST = 3.0e38


class SamplingChain:
    """Picks one token per row: processors, grammar mask, log-probabilities, sampling, history, in this order.

    Every row gets the token that it would get alone, bit for bit. What a row does not use costs it nothing, and a
    batch of greedy rows is a single argmax.

    Args:
        setups: one entry per row.
        vocab_size: V.
        may_read: whether a step may read from the device which rows need their vocabulary sorted; None allows it on
            the CPU, where sorting is slow and a read is cheap.

    Raises:
        InvalidSamplingParams: a logit bias outside the vocabulary.
    """

    def __init__(self, setups: Sequence[RowSetup], vocab_size: int, *, may_read: bool | None = None) -> None:
        params = [setup.params for setup in setups]
        for entry in params:
            check_vocabulary(entry, vocab_size)
        if may_read is None:
            may_read = mx.default_device() == mx.Device(mx.cpu)
        changed = [row for row, setup in enumerate(setups) if changes_logits(setup)]
        self._changed = changed
        self._changed_ids = mx.array(changed, mx.int32)
        self._processors = Processors([setups[row] for row in changed], vocab_size) if changed else None
        self._replace = row_replacement(changed, len(params))
        self._logprobs = {row: entry.logprobs for row, entry in enumerate(params) if entry.logprobs is not None}
        self._with_histogram = frozenset(row for row, entry in enumerate(params) if entry.logprob_histogram)
        self._groups = _groups(setups, changed, vocab_size, may_read=may_read)
        self._order = _order(self._groups, len(params))

    def pick(self, logits: mx.array, keys: Sequence[int], steps: Sequence[int]) -> SampledStep:
        """Pick the tokens of one step, lazily but for what `may_read` allows, and record them in the histories.

        Args:
            logits: `(B, V)` floating point.
            keys: one 64-bit key per row; those of greedy rows are not used.
            steps: each row's own step.
        """
        changed = self._process(logits, steps)
        tokens = self._draw(logits, changed, keys)
        if self._processors is not None:
            self._processors.record(tokens[self._changed_ids])
        if not self._logprobs:
            return SampledStep(tokens=tokens)
        scored = logits if changed is None else self._replace(logits, changed)
        captured = StepLogprobs.of(scored, tokens, self._logprobs, self._with_histogram)
        return SampledStep(tokens=tokens, logprobs=captured)

    def pick_scored(self, logits: mx.array, keys: Sequence[int], steps: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Pick as `pick`, but record nothing; returns tokens `(B,) int32`, and the logits drawn from `(B, V)`."""
        changed = self._process(logits, steps)
        scored = logits if changed is None else self._replace(logits, changed)
        return self._draw(logits, changed, keys), scored

    def _draw(self, logits: mx.array, changed: mx.array | None, keys: Sequence[int]) -> mx.array:
        parts = [group(logits if changed is None or not group.is_changed else changed, keys) for group in self._groups]
        return parts[0] if self._order is None else mx.concatenate(parts)[self._order]

    def _process(self, logits: mx.array, steps: Sequence[int]) -> mx.array | None:
        """Return the logits of the rows that change them, apart: putting them back would copy the whole batch."""
        if self._processors is None:
            return None
        chosen = logits if len(self._changed) == logits.shape[0] else logits[self._changed_ids]
        return self._processors.apply(chosen, [steps[row] for row in self._changed])


class _Group:
    """Rows that are picked in the same way, from the logits as given or as changed.

    Args:
        rows: indices in the batch.
        source: rows of the batch that the logits given to a call have, in their order.
        is_changed: whether those are the changed logits.
        params: of `rows`.
        draw: None takes the best token.
    """

    def __init__(
        self,
        rows: list[int],
        source: Sequence[int],
        params: Sequence[SamplingParams],
        draw: Draw | None,
        *,
        is_changed: bool,
    ) -> None:
        self.rows = rows
        self.is_changed = is_changed
        place_of = {row: place for place, row in enumerate(source)}
        places = [place_of[row] for row in rows]
        self._row_ids = None if len(rows) == len(source) else mx.array(places, mx.int32)
        self._before = [] if draw is None or isinstance(draw, CurveDraw) else sigma_filter(params)
        self._draw = draw

    def __call__(self, logits: mx.array, keys: Sequence[int]) -> mx.array:
        chosen = logits if self._row_ids is None else logits[self._row_ids]
        if self._draw is None:
            return mx.argmax(chosen, axis=-1).astype(mx.int32)
        scores = centred(chosen)
        for keep in self._before:
            scores = keep(scores)
        return self._draw(scores, [keys[row] for row in self.rows])


def centred(logits: mx.array) -> mx.array:
    """Shift logits so that the best of each row is 0, `(R, V) float32`."""
    # Finite at the top, so that a certain token gives differences of minus infinity and not NaN.
    scores = mx.minimum(logits.astype(mx.float32), _LARGEST)
    return scores - mx.maximum(mx.max(scores, axis=-1, keepdims=True), -_LARGEST)


def _groups(setups: Sequence[RowSetup], changed: list[int], vocab_size: int, *, may_read: bool) -> list[_Group]:
    kinds: dict[tuple[str, bool], list[int]] = {}
    is_changed_row = set(changed)
    for row, setup in enumerate(setups):
        kinds.setdefault((_kind(setup.params, vocab_size), row in is_changed_row), []).append(row)
    groups: list[_Group] = []
    for (kind, is_changed), rows in kinds.items():
        chosen = [setups[row] for row in rows]
        draw = _draw(kind, chosen, vocab_size, may_read=may_read)
        source = changed if is_changed else range(len(setups))
        groups.append(_Group(rows, source, [setup.params for setup in chosen], draw, is_changed=is_changed))
    return groups


def _draw(kind: str, setups: Sequence[RowSetup], vocab_size: int, *, may_read: bool) -> Draw | None:
    params = [setup.params for setup in setups]
    if kind == "curve":
        return CurveDraw(params)
    if kind in {"ranked", "few"}:
        count = FEW_CANDIDATES if kind == "few" else NUM_CANDIDATES
        return RankedDraw(params, vocab_size, num_candidates=count, may_read=may_read)
    if kind == "plain":
        exempt = [(*setup.params.xtc_exempt, *setup.eos_token_ids) for setup in setups]
        return PlainDraw(params, exempt, vocab_size)
    return None


def _kind(params: SamplingParams, vocab_size: int) -> str:
    if params.is_greedy:
        return "greedy"
    if params.curve is not None or params.hlg is not None:
        return "curve"
    ranks = uses_top_p(params) or (0 < params.top_k < vocab_size and is_bounded(params, vocab_size))
    # XTC and typical-p drop from the middle of the ranking and need every token's probability.
    if not ranks or params.xtc_probability or uses_typical(params):
        return "plain"
    # The row's own parameters decide, so that neighbours do not change how ties fall.
    return "few" if 0 < params.top_k <= FEW_CANDIDATES else "ranked"


def _order(groups: Sequence[_Group], num_rows: int) -> mx.array | None:
    """Return where each row's token is in the groups' tokens one after the other; None if it is in place."""
    if len(groups) <= 1:
        return None
    places = [0] * num_rows
    for place, row in enumerate(row for group in groups for row in group.rows):
        places[row] = place
    return mx.array(places, mx.int32)
