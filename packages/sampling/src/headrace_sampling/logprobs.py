"""Log-probabilities of picked tokens: captured on the device, read with the token.

They are those of the whole vocabulary after processors and grammar mask, before filters and temperature: what the
model thinks of the token, whatever was allowed to be drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import define, field

from headrace_sampling.curves import FLOOR
from headrace_sampling.errors import InvalidSamplingParams
from headrace_sampling.token_logprobs import LogprobHistogram, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

NUM_BINS = 80
"""Bins of a histogram; they span the probabilities that a tone curve's points can name."""


@define(eq=False)
class StepLogprobs:
    """Log-probabilities of one step on the device, for the rows that asked.

    Attributes:
        arrays: what to evaluate with the step's tokens: `(R,)` token ids, `(R,)` log-probabilities, and `(R, N)` ids
            and log-probabilities of the best candidates, N the most that a row asked for. With histograms also two of
            `(R, NUM_BINS + 1)`, counts and masses, what is below the bins first.
    """

    arrays: tuple[mx.array, ...]
    _places: Mapping[int, tuple[int, int]]
    _with_histogram: Collection[int] = ()
    _read: list[TokenLogprobs] | None = field(default=None, init=False)

    @classmethod
    def of(
        cls,
        logits: mx.array,
        tokens: mx.array,
        num_top_by_row: Mapping[int, int],
        with_histogram: Collection[int] = (),
    ) -> StepLogprobs:
        """Capture the tokens' log-probabilities, lazily.

        Args:
            logits: `(B, V)` after processors and mask.
            tokens: `(B,)` integer.
            num_top_by_row: rows that capture, and how many best candidates each.
            with_histogram: those of them that want one.
        """
        rows = list(num_top_by_row)
        if len(rows) < logits.shape[0]:
            row_ids = mx.array(rows, mx.int32)
            logits, tokens = logits[row_ids], tokens[row_ids]
        arrays = _measure(logits, tokens, max(num_top_by_row.values()))
        if with_histogram:
            arrays += _spread(logits)
        return cls(arrays, {row: (place, num_top_by_row[row]) for place, row in enumerate(rows)}, with_histogram)

    def row(self, row: int) -> TokenLogprobs:
        """Read one row's; the first call reads those of all rows from the device at once."""
        place, num_top = self._places[row]
        if self._read is None:
            self._read = _entries(self.arrays)
        entry = self._read[place]
        return TokenLogprobs(
            token_id=entry.token_id,
            logprob=entry.logprob,
            top=entry.top[:num_top],
            histogram=entry.histogram if row in self._with_histogram else None,
        )


def score_tokens(logits: mx.array, token_ids: Sequence[int], *, num_top: int = 0) -> list[TokenLogprobs]:
    """Score known tokens, for example a prompt that is echoed: token i by the logits of the position before it.

    Args:
        logits: `(T, V)` floating point; row i predicts token i.
        token_ids: T ids.
        num_top: best candidates per position, 0 to 20.

    Raises:
        InvalidSamplingParams: not one token per position, or an id or a number outside its range.
    """
    num_positions, vocab_size = logits.shape
    if len(token_ids) != num_positions:
        raise InvalidSamplingParams("token_ids", len(token_ids), f"{num_positions}, one per position of the logits")
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidSamplingParams("token_ids", token_id, f"token ids from 0 to {vocab_size - 1}")
    if not 0 <= num_top <= 20:
        raise InvalidSamplingParams("num_top", num_top, "an integer from 0 to 20")
    if not token_ids:
        return []
    return _entries(_measure(logits, mx.array(list(token_ids), mx.int32), num_top))


def _measure(logits: mx.array, tokens: mx.array, num_top: int) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    wide = logits.astype(mx.float32)
    total = mx.logsumexp(wide, axis=-1, keepdims=True)
    picked = (mx.take_along_axis(wide, tokens[:, None], axis=-1) - total)[:, 0]
    num_top = min(num_top, wide.shape[-1])
    if num_top == 0:
        nothing = mx.zeros((wide.shape[0], 0))
        return tokens, picked, nothing.astype(mx.int32), nothing
    ids = mx.argpartition(wide, kth=-num_top, axis=-1)[:, -num_top:].astype(mx.int32)
    return tokens, picked, ids, mx.take_along_axis(wide, ids, axis=-1) - total


def _spread(logits: mx.array) -> tuple[mx.array, mx.array]:
    wide = logits.astype(mx.float32)
    logprobs = wide - mx.logsumexp(wide, axis=-1, keepdims=True)
    # Rounding may leave a log-probability above 0; what is below the bins, minus infinity included, has place 0.
    binned = mx.floor((mx.maximum(logprobs, 2 * FLOOR) - FLOOR) * (NUM_BINS / -FLOOR))
    places = mx.clip(binned, -1, NUM_BINS - 1).astype(mx.int32) + 1
    rows = mx.arange(wide.shape[0])[:, None]
    empty = mx.zeros((wide.shape[0], NUM_BINS + 1))
    return empty.at[rows, places].add(1.0), empty.at[rows, places].add(mx.exp(logprobs))


def _entries(arrays: tuple[mx.array, ...]) -> list[TokenLogprobs]:
    mx.eval(arrays)
    columns = [array.tolist() for array in arrays]
    return [_entry(*row) for row in zip(*columns, strict=True)]  # pyright: ignore[reportArgumentType]


def _entry(
    token_id: int,
    logprob: float,
    ids: list[int],
    logprobs: list[float],
    counts: Sequence[float] = (),
    masses: Sequence[float] = (),
) -> TokenLogprobs:
    top = sorted(zip(ids, logprobs, strict=True), key=lambda pair: (-pair[1], pair[0]))
    histogram = None
    if counts:
        num_below, *rest = (int(count) for count in counts)
        histogram = LogprobHistogram(
            low=FLOOR, counts=tuple(rest), masses=tuple(masses[1:]), num_below=num_below, mass_below=masses[0]
        )
    return TokenLogprobs(token_id=token_id, logprob=logprob, top=tuple(top), histogram=histogram)
