"""The logits processors of a fixed set of rows: bias, penalties, DRY, minimum length, grammar mask, in this order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from headrace_sampling import penalties
from headrace_sampling.bitmask import TokenBitmask, close_tokens
from headrace_sampling.history import EMPTY, HistoryStack, RowHistory
from headrace_sampling.layout import column, row_replacement

if TYPE_CHECKING:
    from headrace_sampling.params import SamplingParams
    from headrace_sampling.setup import RowSetup

Entries = tuple[mx.array, mx.array, mx.array]
Penalty = Callable[[mx.array], mx.array]


def changes_logits(setup: RowSetup) -> bool:
    """Whether a row needs processors at all."""
    closes_eos = setup.params.min_tokens and setup.eos_token_ids
    return bool(setup.params.logit_bias or setup.history or setup.mask or closes_eos)


class Processors:
    """Changes the logits of rows that ask for it. A processor that no row uses costs nothing.

    Args:
        setups: one per row, each of which changes its logits.
        vocab_size: V.
    """

    def __init__(self, setups: Sequence[RowSetup], vocab_size: int) -> None:
        self._bias = _bias_entries(setups)
        self._penalties = _Penalties.of(setups, vocab_size)
        self._least_tokens = [
            (row, setup.params.min_tokens, _inside(setup.eos_token_ids, vocab_size))
            for row, setup in enumerate(setups)
            if setup.params.min_tokens and setup.eos_token_ids
        ]
        self._bitmasks = {row: setup.mask for row, setup in enumerate(setups) if isinstance(setup.mask, TokenBitmask)}
        self._masks = [
            (row, setup.mask)
            for row, setup in enumerate(setups)
            if setup.mask is not None and row not in self._bitmasks
        ]

    def apply(self, logits: mx.array, steps: Sequence[int]) -> mx.array:
        """Return the logits to sample from, `(B, V) float32`.

        Args:
            logits: `(B, V)` floating point.
            steps: each row's own step.
        """
        logits = logits.astype(mx.float32)
        if self._bias is not None:
            rows, token_ids, values = self._bias
            logits = logits.at[rows, token_ids].add(values)
        if self._penalties is not None:
            logits = self._penalties.apply(logits)
        closed = [(row, ids) for row, least, ids in self._least_tokens if ids and steps[row] < least]
        # A complete grammar ends the row however short it is.
        closed = [(row, ids) for row, ids in closed if row not in self._bitmasks or not self._bitmasks[row].only_ends]
        if closed:
            rows = [row for row, ids in closed for _ in ids]
            logits = mx.array(logits)
            logits[mx.array(rows), mx.array([one for _, ids in closed for one in ids])] = -mx.inf
        return self._masked(logits)

    def record(self, tokens: mx.array) -> None:
        """Add the sampled tokens `(B,) int32` to the histories, lazily."""
        if self._penalties is not None:
            self._penalties.record(tokens)

    def _masked(self, logits: mx.array) -> mx.array:
        if self._bitmasks:
            masks = {row: mask.mask_words() for row, mask in self._bitmasks.items()}
            logits = close_tokens(logits, [masks.get(row) for row in range(logits.shape[0])])
        if not self._masks:
            return logits
        parts = {row: mask.apply_mask(logits[row : row + 1]) for row, mask in self._masks}
        return mx.concatenate([parts.get(row, logits[row : row + 1]) for row in range(logits.shape[0])])


class _Penalties:
    """The penalties of the rows that have a history, over the stack of their histories."""

    def __init__(self, setups: Sequence[RowSetup], rows: list[int], vocab_size: int) -> None:
        chosen = [setups[row] for row in rows]
        params = [setup.params for setup in chosen]
        self._rows = None if len(rows) == len(setups) else mx.array(rows, mx.int32)
        self._replace = row_replacement(rows, len(setups))
        histories = cast("tuple[RowHistory, ...]", tuple(setup.history for setup in chosen))
        self._stack = HistoryStack(histories, vocab_size)
        records = [setup.records_history for setup in chosen]
        self._is_recorded = None if all(records) else mx.array(records)[:, None]
        self._steps = [
            step
            for step in (
                _repetition(params, self._stack),
                _seen_penalty(params, self._stack, "presence", penalties.penalise_present),
                _seen_penalty(params, self._stack, "frequency", penalties.penalise_frequent),
                _counted(params, self._stack),
                _runs(params, self._stack),
            )
            if step is not None
        ]

    @classmethod
    def of(cls, setups: Sequence[RowSetup], vocab_size: int) -> _Penalties | None:
        rows = [row for row, setup in enumerate(setups) if setup.history is not None]
        return cls(setups, rows, vocab_size) if rows else None

    def apply(self, logits: mx.array) -> mx.array:
        self._stack.refresh()
        chosen = logits if self._rows is None else logits[self._rows]
        for step in self._steps:
            chosen = step(chosen)
        return chosen if self._rows is None else self._replace(logits, chosen)

    def record(self, tokens: mx.array) -> None:
        chosen = tokens if self._rows is None else tokens[self._rows]
        self._stack.record(chosen, self._is_recorded)


def _repetition(params: Sequence[SamplingParams], stack: HistoryStack) -> Penalty | None:
    if not any(entry.penalises_repetition for entry in params):
        return None
    factors = column([entry.repetition_penalty if entry.penalises_repetition else 1.0 for entry in params])
    windows = [entry.repetition_window if entry.penalises_repetition else 0 for entry in params]
    is_whole = [entry.penalises_repetition and entry.repetition_window == 0 for entry in params]
    in_window = _last(windows, stack)
    in_prompt = _prompts(is_whole, stack)

    def apply(logits: mx.array) -> mx.array:
        if in_prompt is not None and stack.counts is not None:
            marks, whole = in_prompt
            logits = penalties.penalise_repeated_anywhere(logits, marks | ((stack.counts > 0) & whole), factors)
        if in_window is None:
            return logits
        return penalties.penalise_repeated(logits, mx.where(in_window, _token_ids(stack.ring), EMPTY), factors)

    return apply


def _prompts(is_whole: list[bool], stack: HistoryStack) -> tuple[mx.array, mx.array] | None:
    """Return the marks of the prompts' tokens `(R, V)`, and the rows that they are for `(R, 1)`, if there are any."""
    if not any(is_whole):
        return None
    nothing = mx.zeros((stack.vocab_size,), mx.bool_)
    marks = [
        row.in_prompt(stack.vocab_size) if whole else nothing for row, whole in zip(stack.rows, is_whole, strict=True)
    ]
    return mx.stack(marks), mx.array(is_whole)[:, None]


def _seen_penalty(
    params: Sequence[SamplingParams],
    stack: HistoryStack,
    name: str,
    penalise: Callable[[mx.array, mx.array, mx.array], mx.array],
) -> Penalty | None:
    """Lay out a penalty on tokens of the reply within a window."""
    amounts, windows = _amounts(params, name, windowed=True)
    in_window = _last(windows, stack)
    if in_window is None:
        return None

    def apply(logits: mx.array) -> mx.array:
        is_reply = in_window & (stack.ring >= 0)
        return penalise(logits, mx.where(is_reply, stack.ring, EMPTY), amounts)

    return apply


def _counted(params: Sequence[SamplingParams], stack: HistoryStack) -> Penalty | None:
    """Lay out presence and frequency penalties over the whole reply."""
    if not any(
        (entry.presence_penalty and entry.presence_window == 0)
        or (entry.frequency_penalty and entry.frequency_window == 0)
        for entry in params
    ):
        return None
    presence, _ = _amounts(params, "presence", windowed=False)
    frequency, _ = _amounts(params, "frequency", windowed=False)

    def apply(logits: mx.array) -> mx.array:
        return penalties.penalise_counted(logits, cast("mx.array", stack.counts), presence, frequency)

    return apply


def _runs(params: Sequence[SamplingParams], stack: HistoryStack) -> Penalty | None:
    if not any(entry.dry_multiplier for entry in params):
        return None
    in_window = _last([entry.dry_window if entry.dry_multiplier else 0 for entry in params], stack)
    breakers = [entry.dry_breakers for entry in params]
    widest = max(1, *map(len, breakers))
    # No token has id -1, so that it fills rows with fewer breakers.
    table = mx.array([[*ids, *[-1] * (widest - len(ids))] for ids in breakers], mx.int32)
    penalise = partial(
        penalties.penalise_runs,
        multiplier=column([entry.dry_multiplier for entry in params]),
        base=column([entry.dry_base for entry in params]),
        allowed_length=mx.array([[entry.dry_allowed_length] for entry in params], mx.int32),
        max_length=max(entry.dry_allowed_length for entry in params if entry.dry_multiplier) + penalties.DRY_GROWTH,
    )

    def apply(logits: mx.array) -> mx.array:
        ids = _token_ids(stack.ring)
        tokens = ids if in_window is None else mx.where(in_window, ids, EMPTY)
        is_breaker = mx.any(tokens[:, :, None] == table[:, None], axis=-1)
        return penalise(logits, tokens, is_breaker)

    return apply


def _amounts(params: Sequence[SamplingParams], name: str, *, windowed: bool) -> tuple[mx.array, list[int]]:
    """Return a penalty's amounts `(R, 1)` and windows, 0 for rows that use the other kind of window."""
    pairs = [
        (entry.presence_penalty, entry.presence_window)
        if name == "presence"
        else (entry.frequency_penalty, entry.frequency_window)
        for entry in params
    ]
    pairs = [(amount, window) if (window > 0) is windowed and amount else (0.0, 0) for amount, window in pairs]
    return column([amount for amount, _ in pairs]), [window for _, window in pairs]


def _last(windows: list[int], stack: HistoryStack) -> mx.array | None:
    """Mark the last places of each row's ring, `(R, W) bool`; None if no row has a window."""
    if not any(windows):
        return None
    width = stack.ring.shape[1]
    return mx.arange(width)[None] >= width - mx.array(windows, mx.int32)[:, None]


def _token_ids(ring: mx.array) -> mx.array:
    """Return ids of prompt and reply alike; `EMPTY` stays."""
    return mx.where(ring < 0, -ring - 1, ring)


def _bias_entries(setups: Sequence[RowSetup]) -> Entries | None:
    entries = [(row, token_id, bias) for row, one in enumerate(setups) for token_id, bias in one.params.logit_bias]
    if not entries:
        return None
    rows, token_ids, values = zip(*entries, strict=True)
    return mx.array(rows, mx.int32), mx.array(token_ids, mx.int32), mx.array(values, mx.float32)


def _inside(token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    return tuple(token_id for token_id in token_ids if 0 <= token_id < vocab_size)
