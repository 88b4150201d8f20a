"""Penalties on tokens that a row has seen, over rows: pure functions of logits and history.

Logits are `(R, V) float32`. A history is `(R, W) int32` of token ids, the newest last; a place that does not count
holds V or more, and changes nothing. Parameters are `(R, 1) float32`, one per row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_DRY_PENALTY = 1e30
DRY_GROWTH = 32
"""By how many tokens beyond the allowed length the DRY penalty grows; longer runs cost the same."""


def penalise_repeated(logits: mx.array, seen: mx.array, penalty: mx.array) -> mx.array:
    """Divide a seen token's positive logit by the penalty and multiply a negative one (Keskar et al., 2019)."""
    return _set_seen(logits, seen, lambda chosen: _scaled(chosen, penalty))


def penalise_present(logits: mx.array, seen: mx.array, penalty: mx.array) -> mx.array:
    """Subtract the penalty once from the logit of each seen token."""
    return _set_seen(logits, seen, lambda chosen: chosen - penalty)


def penalise_frequent(logits: mx.array, seen: mx.array, penalty: mx.array) -> mx.array:
    """Subtract the penalty from a token's logit for each time that it is seen."""
    places, counts = _places(seen, logits.shape[1])
    amounts = mx.where(counts, -penalty, 0.0)
    return logits.at[mx.arange(logits.shape[0])[:, None], places].add(amounts)


def penalise_repeated_anywhere(logits: mx.array, is_seen: mx.array, penalty: mx.array) -> mx.array:
    """As `penalise_repeated`, for all tokens marked in `is_seen (R, V) bool`."""
    return mx.where(is_seen, _scaled(logits, penalty), logits)


def penalise_counted(logits: mx.array, counts: mx.array, presence: mx.array, frequency: mx.array) -> mx.array:
    """Subtract both penalties for tokens counted in `counts (R, V) int32`: presence once, frequency per count."""
    return logits - presence * (counts > 0) - frequency * counts


def penalise_runs(
    logits: mx.array,
    history: mx.array,
    is_breaker: mx.array,
    multiplier: mx.array,
    base: mx.array,
    allowed_length: mx.array,
    *,
    max_length: int,
) -> mx.array:
    """Penalise tokens that would extend a repeated run: DRY, don't repeat yourself (p-e-w, 2024).

    If the history's last n tokens occurred before, followed by token t, and n is at least the allowed length, then t
    loses `multiplier * base ** (n - allowed_length)`, for the longest such n. At most `DRY_GROWTH` tokens beyond the
    allowed length count.

    Args:
        logits: `(R, V) float32`.
        history: `(R, W) int32`, W at least 2; places that do not count hold V or more.
        is_breaker: `(R, W) bool`, places that no run reaches across.
        multiplier: `(R, 1) float32`.
        base: `(R, 1) float32`, at least 1.
        allowed_length: `(R, 1) int32`, at least 1.
        max_length: longest run looked for, at least the largest allowed length plus `DRY_GROWTH`.
    """
    num_rows, vocab_size = logits.shape
    width = history.shape[1]
    length = min(max_length, width - 1)
    blocked = is_breaker | (history >= vocab_size)
    # Position i of `windows` holds the tokens at i, i - 1, ..., i - length + 1; before the start nothing matches.
    padded = mx.concatenate([mx.full((num_rows, length - 1), -1, mx.int32), history], axis=1)
    starts = mx.arange(width - 1)[:, None] + (length - 1) - mx.arange(length)[None]
    windows = padded[:, starts]
    newest_first = width - 1 - mx.arange(length)
    suffix, is_open = history[:, newest_first], ~blocked[:, newest_first]
    matches = (windows == suffix[:, None]) & is_open[:, None]
    run = mx.sum(mx.cumprod(matches.astype(mx.int32), axis=-1), axis=-1)
    excess = mx.minimum(run - allowed_length, DRY_GROWTH)
    penalty = mx.minimum(multiplier * mx.power(base, excess.astype(mx.float32)), _MAX_DRY_PENALTY)
    penalty = mx.where(excess >= 0, penalty, 0.0)
    following = mx.minimum(history[:, 1:], vocab_size)
    worst = mx.zeros((num_rows, vocab_size + 1)).at[mx.arange(num_rows)[:, None], following].maximum(penalty)
    return logits - worst[:, :-1]


def _scaled(logits: mx.array, penalty: mx.array) -> mx.array:
    return mx.where(logits < 0, logits * penalty, logits / penalty)


def _set_seen(logits: mx.array, seen: mx.array, change: Callable[[mx.array], mx.array]) -> mx.array:
    places, counts = _places(seen, logits.shape[1])
    # A place that does not count repeats one that does, so that both write the same; without any, nothing changes.
    spare = mx.max(mx.where(counts, places, 0), axis=-1, keepdims=True)
    places = mx.where(counts, places, spare)
    chosen = mx.take_along_axis(logits, places, axis=1)
    changed = mx.where(mx.any(counts, axis=-1, keepdims=True), change(chosen), chosen)
    return mx.put_along_axis(logits, places, changed, axis=1)


def _places(seen: mx.array, vocab_size: int) -> tuple[mx.array, mx.array]:
    """Return indices inside the vocabulary, and which of them count."""
    counts = seen < vocab_size
    return mx.where(counts, seen, 0), counts
