"""Parameters of several rows laid out as arrays, and filters laid out over the rows that use them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_sampling.filters import keep_min_p, keep_top_k, keep_top_n_sigma, keep_top_p, keep_typical

if TYPE_CHECKING:
    from headrace_sampling.params import SamplingParams

Filter = Callable[[mx.array], mx.array]

# Below this every score but the best underflows anyway, and the division stays finite in float32.
_MIN_TEMPERATURE = 1e-30


def column(values: Iterable[float]) -> mx.array:
    """Lay out one value per row, `(R, 1) float32`."""
    return mx.array([[value] for value in values], mx.float32).reshape(-1, 1)


def temperatures(params: Sequence[SamplingParams]) -> mx.array:
    """Lay out the temperatures, `(R, 1) float32`, none of them 0."""
    return column([max(entry.temperature, _MIN_TEMPERATURE) for entry in params])


def uses_top_p(params: SamplingParams) -> bool:
    """Whether top-p drops anything."""
    return 0 < params.top_p < 1


def uses_typical(params: SamplingParams) -> bool:
    """Whether typical-p drops anything."""
    return 0 < params.typical_p < 1


def on_rows(rows: list[int], num_rows: int, change: Filter) -> Filter:
    """Apply a change to some of the rows, all of which it is laid out for."""
    if len(rows) == num_rows:
        return change
    row_ids, replace = mx.array(rows, mx.int32), row_replacement(rows, num_rows)
    return lambda scores: replace(scores, change(scores[row_ids]))


def row_replacement(rows: list[int], num_rows: int) -> Callable[[mx.array, mx.array], mx.array]:
    """Make a function that returns `(num_rows, V)` with the given rows replaced by `(len(rows), V)`."""
    sources = list(range(num_rows))
    for place, row in enumerate(rows):
        sources[row] = num_rows + place
    order = mx.array(sources, mx.int32)
    # Half the time of writing the rows into a copy.
    return lambda scores, changed: mx.concatenate([scores, changed])[order]


def sigma_filter(params: Sequence[SamplingParams]) -> list[Filter]:
    """Lay out top-n-sigma, the first filter: its deviation is that of all logits."""
    rows = [row for row, entry in enumerate(params) if entry.top_n_sigma]
    if not rows:
        return []
    sigmas = column([params[row].top_n_sigma for row in rows])
    return [on_rows(rows, len(params), partial(keep_top_n_sigma, num_sigmas=sigmas))]


def filters_of(params: Sequence[SamplingParams], vocab_size: int) -> list[Filter]:
    """Lay out top-p, min-p, typical-p and top-k, in this order, each over the rows that use it.

    XTC belongs between the last two, but draws anew at each step: see `draws`.
    """
    return [*share_filters(params), *count_filters(params, vocab_size)]


def share_filters(params: Sequence[SamplingParams]) -> list[Filter]:
    """Lay out top-p, min-p and typical-p."""
    filters: list[Filter] = []
    nucleus = [row for row, entry in enumerate(params) if uses_top_p(entry)]
    if nucleus:
        shares = column([params[row].top_p for row in nucleus])
        filters.append(on_rows(nucleus, len(params), partial(keep_top_p, top_p=shares)))
    for least, rows in _grouped(params, lambda entry: entry.min_tokens_to_keep if entry.min_p else None).items():
        thresholds = column([math.log(params[row].min_p) for row in rows])
        keep = partial(keep_min_p, log_min_p=thresholds, min_tokens_to_keep=least)
        filters.append(on_rows(rows, len(params), keep))
    typical = [row for row, entry in enumerate(params) if uses_typical(entry)]
    if typical:
        shares = column([params[row].typical_p for row in typical])
        filters.append(on_rows(typical, len(params), partial(keep_typical, typical_p=shares)))
    return filters


def count_filters(params: Sequence[SamplingParams], vocab_size: int) -> list[Filter]:
    """Lay out top-k, one filter per number of tokens kept."""
    groups = _grouped(params, lambda entry: entry.top_k if 0 < entry.top_k < vocab_size else None)
    return [on_rows(rows, len(params), partial(keep_top_k, top_k=top_k)) for top_k, rows in groups.items()]


def _grouped(params: Sequence[SamplingParams], key_of: Callable[[SamplingParams], int | None]) -> dict[int, list[int]]:
    """Group rows by a key, without those that have none."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for row, entry in enumerate(params):
        key = key_of(entry)
        if key is not None:
            groups[key].append(row)
    return groups
