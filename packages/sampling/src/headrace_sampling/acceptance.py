"""Acceptance of drafted tokens: one forward pass scores a draft, and part of it is kept.

Two rules, both exact: what is emitted has the distribution of undrafted sampling.

- *Match*: every position is sampled as it would be without a draft, and the draft is kept as long as it is equal. A row
  emits the very tokens that its seed gives undrafted. For drafts that are not random, or whose distribution is unknown.
- *Rejection* (Leviathan et al., 2023; Chen et al., 2023): a token drawn from q is kept with probability min(1, p / q),
  else replaced by a draw from the normalised excess of p over q. For drafts that come with their distribution.

For a draft that is a single token for sure, rejection keeps it with probability p and otherwise draws from p without
it: that is match.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx
from attrs import define, evolve, field, frozen

from headrace_sampling.bitmask import GrammarState
from headrace_sampling.chain import SamplingChain, centred
from headrace_sampling.draws import CurveDraw, PlainDraw
from headrace_sampling.errors import BatchMismatch, InvalidDrafts
from headrace_sampling.layout import sigma_filter
from headrace_sampling.logprobs import StepLogprobs
from headrace_sampling.noise import key_words, vocabulary_noise
from headrace_sampling.seeds import mix_seed, step_key, unit_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_sampling.sampler import RowSampling
    from headrace_sampling.setup import GrammarMask, RowSetup

# Of the independent keys that a step's key is mixed into, the third and the fourth.
_ACCEPT_INDEX, _RESIDUAL_INDEX = 3, 4


class RowDraft(Protocol):
    """The draft of one row.

    Attributes:
        tokens: the drafted tokens in order, none for a row without a draft.
        logprobs: `(len(tokens), V)` natural log-probabilities of the distributions that each token was really drawn
            from, its temperature and filters included; None for match.
    """

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> mx.array | None: ...


@frozen(eq=False)
class _Place:
    """One position of one row, treated as a row of its own."""

    row: int
    position: int
    setup: RowSetup
    step: int
    key: int


@define(eq=False)
class AcceptedDrafts:
    """What one verification keeps, on the device until `settle`.

    Attributes:
        tokens: `(B, T) int32`; row b emits its first `num_accepted[b] + 1`, what follows means nothing.
        num_accepted: `(B,) int32`, drafted tokens kept.
        logprobs: those of all positions of rows that capture them; `settle` hands them to their rows.
    """

    tokens: mx.array
    num_accepted: mx.array
    logprobs: StepLogprobs | None
    _rows: Sequence[RowSampling]
    _first_places: Sequence[int]
    _emitted: list[list[int]] | None = field(default=None, init=False)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """What to evaluate together."""
        captured = () if self.logprobs is None else self.logprobs.arrays
        return (self.tokens, self.num_accepted, *captured)

    def settle(self) -> list[list[int]]:
        """Read the result and take it into the rows: steps, histories, log-probabilities and grammars.

        Returns:
            The tokens that each row emits, 1 to its number of drafts + 1: cut after the first that ends the row. The
            row's `emit` is called by the caller, once per token. Further calls return the same.

        Raises:
            TokenNotAllowed: logits without any open token led to a closed one.
        """
        if self._emitted is None:
            mx.eval(*self.arrays)
            counts: list[int] = self.num_accepted.tolist()  # pyright: ignore[reportAssignmentType]
            ids: list[list[int]] = self.tokens.tolist()  # pyright: ignore[reportAssignmentType]
            self._emitted = [
                self._settle_row(row, place, ids[index][: counts[index] + 1])
                for index, (row, place) in enumerate(zip(self._rows, self._first_places, strict=True))
            ]
        return self._emitted

    def _settle_row(self, row: RowSampling, first_place: int, token_ids: list[int]) -> list[int]:
        setup = row.sampler.setup
        ends = () if setup.params.ignore_eos else setup.eos_token_ids
        emitted: list[int] = []
        for token_id in token_ids:
            if isinstance(setup.mask, GrammarState):
                setup.mask.accept(token_id)
            row.advance(self.logprobs, first_place + len(emitted))
            emitted.append(token_id)
            if token_id in ends or (isinstance(setup.mask, GrammarState) and setup.mask.is_terminated):
                break
        if setup.records_history:
            row.sampler.record(emitted)
        return emitted


def accept_drafts(logits: mx.array, rows: Sequence[RowSampling], drafts: Sequence[RowDraft]) -> AcceptedDrafts:
    """Decide which drafted tokens are kept, and sample the token after them, lazily but for what top-p rows may read.

    A row's grammar and history stand before the draft, also when it returns: `AcceptedDrafts.settle` moves them on.

    Args:
        logits: `(B, T, V)` floating point, T at least the longest draft + 1: row b, position i predicts the token that
            follows its first i drafted ones. Positions after a row's own draft are not looked at.
        rows: one per row of the logits, at the step of position 0.
        drafts: one per row.

    Raises:
        BatchMismatch: there is not one of `rows` per row.
        InvalidDrafts: a draft does not fit, or a row with a draft has a mask that cannot be walked ahead.
        InvalidSamplingParams: a logit bias outside the vocabulary.
        GrammarFailed: no token may follow in some row.
    """
    num_rows, width, vocab_size = logits.shape
    if len(rows) != num_rows:
        raise BatchMismatch(num_rows, len(rows))
    _check(drafts, num_rows, width, vocab_size)
    places = [
        place
        for index, (row, draft) in enumerate(zip(rows, drafts, strict=True))
        for place in _places(index, row, [*draft.tokens])
    ]
    flat = logits.reshape(-1, vocab_size)
    if len(places) < flat.shape[0]:
        flat = flat[mx.array([place.row * width + place.position for place in places], mx.int32)]
    chain = SamplingChain([place.setup for place in places], vocab_size)
    keys, steps = [place.key for place in places], [place.step for place in places]
    sampled, scored = chain.pick_scored(flat, keys, steps)
    tokens, is_kept = _decide(places, drafts, sampled, scored)
    captures = {
        index: place.setup.params.logprobs
        for index, place in enumerate(places)
        if place.setup.params.logprobs is not None
    }
    with_histogram = {index for index in captures if places[index].setup.params.logprob_histogram}
    logprobs = StepLogprobs.of(scored, tokens, captures, with_histogram) if captures else None
    firsts = [index for index, place in enumerate(places) if place.position == 0]
    return AcceptedDrafts(
        _spread(tokens, places, num_rows, width),
        mx.sum(mx.cumprod(_spread(is_kept.astype(mx.int32), places, num_rows, width), axis=1), axis=1),
        logprobs,
        tuple(rows),
        firsts,
    )


def _decide(
    places: Sequence[_Place], drafts: Sequence[RowDraft], sampled: mx.array, scored: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the token that each place emits if it is reached, `(N,) int32`, and whether it keeps its draft `(N,)`."""
    # No token has id -1: the place after a draft keeps nothing.
    drafted = mx.array(
        [drafts[one.row].tokens[one.position] if one.position < len(drafts[one.row].tokens) else -1 for one in places],
        mx.int32,
    )
    tokens, is_kept = sampled, sampled == drafted
    random = [
        index
        for index, place in enumerate(places)
        if drafts[place.row].logprobs is not None
        and place.position < len(drafts[place.row].tokens)
        and not place.setup.params.is_greedy
    ]
    if not random:
        return tokens, is_kept
    chosen = [places[index] for index in random]
    row_ids, with_proposal = mx.array(random, mx.int32), {place.row for place in chosen}
    proposals = mx.concatenate(
        [draft.logprobs for row, draft in enumerate(drafts) if draft.logprobs is not None and row in with_proposal]
    )
    found, kept = _reject(chosen, drafted[row_ids], proposals, scored[row_ids])
    tokens = mx.array(tokens)
    tokens[row_ids] = found
    is_kept = mx.array(is_kept)
    is_kept[row_ids] = kept
    return tokens, is_kept


def _reject(
    places: Sequence[_Place], drafted: mx.array, proposals: mx.array, scored: mx.array
) -> tuple[mx.array, mx.array]:
    """Keep or replace each drafted token by rejection sampling.

    Args:
        places: N of them.
        drafted: `(N,)` tokens.
        proposals: `(N, V)` log-probabilities that they were drawn from.
        scored: `(N, V)` logits after processors and mask.

    Returns:
        Tokens `(N,) int32`, and whether each is the drafted one `(N,) bool`.
    """
    target = _log_softmax(_weigh(places, scored))
    proposals = _log_softmax(proposals.astype(mx.float32))
    picked = drafted[:, None]
    log_p = mx.take_along_axis(target, picked, axis=-1)[:, 0]
    log_q = mx.take_along_axis(proposals, picked, axis=-1)[:, 0]
    thresholds = [_log(unit_interval(mix_seed(place.key, _ACCEPT_INDEX))) for place in places]
    kept = (log_p > -mx.inf) & (mx.array(thresholds, mx.float32) + log_q <= log_p)
    excess = mx.maximum(mx.exp(target) - mx.exp(proposals), 0)
    # Without any excess the two agree up to rounding, and a draw from the target is as good.
    has_excess = mx.any(excess > 0, axis=-1, keepdims=True)
    words = key_words([mix_seed(place.key, _RESIDUAL_INDEX) for place in places])
    noisy = mx.where(has_excess, mx.log(excess), target) + vocabulary_noise(words, scored.shape[-1])
    replaced = mx.argmax(noisy, axis=-1).astype(mx.int32)
    return mx.where(kept, drafted, replaced), kept


def _weigh(places: Sequence[_Place], scored: mx.array) -> mx.array:
    """Return the scores `(N, V)` whose softmax each place is drawn from."""
    scores = centred(scored)
    parts: list[tuple[list[int], mx.array]] = []
    for is_curve in (False, True):
        chosen = [index for index, place in enumerate(places) if _has_curve(place) is is_curve]
        if chosen:
            part = scores if len(chosen) == len(places) else scores[mx.array(chosen, mx.int32)]
            parts.append((chosen, _weigh_alike([places[index] for index in chosen], part, is_curve=is_curve)))
    if len(parts) == 1:
        return parts[0][1]
    order = [index for chosen, _ in parts for index in chosen]
    return mx.concatenate([part for _, part in parts])[mx.argsort(mx.array(order, mx.int32))]


def _weigh_alike(places: Sequence[_Place], scores: mx.array, *, is_curve: bool) -> mx.array:
    params = [place.setup.params for place in places]
    if is_curve:
        return CurveDraw(params).weigh(scores)
    for keep in sigma_filter(params):
        scores = keep(scores)
    exempt = [(*place.setup.params.xtc_exempt, *place.setup.eos_token_ids) for place in places]
    return PlainDraw(params, exempt, scores.shape[-1]).weigh(scores, [place.key for place in places])


def _has_curve(place: _Place) -> bool:
    return place.setup.params.curve is not None or place.setup.params.hlg is not None


def _places(index: int, row: RowSampling, draft_ids: list[int]) -> list[_Place]:
    setup, seed = row.sampler.setup, row.sampler.seed
    masks: list[GrammarMask | None] = [setup.mask]
    if draft_ids and setup.mask is not None:
        if not isinstance(setup.mask, GrammarState):
            raise InvalidDrafts("mask", type(setup.mask).__name__, "a GrammarController for a row with a draft")
        # After a closed token or EOS nothing is reached, so that no mask is needed.
        known = setup.mask.draft_masks(draft_ids)
        masks = [*known, *[None] * (len(draft_ids) + 1 - len(known))]
    else:
        masks *= len(draft_ids) + 1
    return [
        _Place(
            row=index,
            position=position,
            setup=_setup_at(setup, masks[position], draft_ids[:position]),
            step=row.step + position,
            key=step_key(seed, row.step + position),
        )
        for position in range(len(draft_ids) + 1)
    ]


def _setup_at(setup: RowSetup, mask: GrammarMask | None, before: list[int]) -> RowSetup:
    if setup.history is None:
        return setup if mask is setup.mask else evolve(setup, mask=mask)
    return evolve(setup, mask=mask, history=setup.history.fork(before))


def _check(drafts: Sequence[RowDraft], num_rows: int, width: int, vocab_size: int) -> None:
    if len(drafts) != num_rows:
        raise InvalidDrafts("drafts", len(drafts), f"{num_rows}, one per row")
    for draft in drafts:
        if len(draft.tokens) >= width:
            raise InvalidDrafts("tokens", len(draft.tokens), f"fewer than the {width} positions of the logits")
        for token_id in draft.tokens:
            if not 0 <= token_id < vocab_size:
                raise InvalidDrafts("tokens", token_id, f"token ids from 0 to {vocab_size - 1}")
        if draft.logprobs is not None and draft.logprobs.shape != (len(draft.tokens), vocab_size):
            raise InvalidDrafts("logprobs", draft.logprobs.shape, f"of shape {(len(draft.tokens), vocab_size)}")


def _spread(values: mx.array, places: Sequence[_Place], num_rows: int, width: int) -> mx.array:
    """Lay `(N,)` values of places out as `(num_rows, width)`, 0 where there is none."""
    if len(places) == num_rows * width:
        return values.reshape(num_rows, width)
    laid = mx.zeros((num_rows * width,), values.dtype)
    laid[mx.array([place.row * width + place.position for place in places], mx.int32)] = values
    return laid.reshape(num_rows, width)


def _log_softmax(scores: mx.array) -> mx.array:
    return scores - mx.logsumexp(scores, axis=-1, keepdims=True)


def _log(value: float) -> float:
    return math.log(value) if value else -math.inf
