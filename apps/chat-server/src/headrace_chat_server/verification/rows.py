"""A model's rows in slots, driven by hand: append tokens, read logits in float32."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Protocol, cast

import mlx.core as mx

from headrace_kvcache import KVScheme, make_row_batch, make_slot_prototypes

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RowModel", "Rows", "deviation"]


class RowModel(Protocol):
    """What the laws ask of a model."""

    def make_cache(self) -> Sequence[Any]: ...
    def forward_hidden(self, ids: mx.array, caches: Sequence[Any]) -> mx.array: ...
    def logits_from_hidden(self, hidden: mx.array) -> mx.array: ...


class Rows:
    """Slots of a model under a scheme.

    Args:
        model: computes.
        scheme: how keys and values are stored; None keeps them as they come.
        max_rows: slots.
    """

    def __init__(self, model: RowModel, *, scheme: KVScheme | None = None, max_rows: int = 1) -> None:
        self._model = model
        prototypes = make_slot_prototypes(model, scheme=scheme)
        self._batch = make_row_batch(prototypes, max_rows=max_rows, starts_unquantized=scheme is not None)
        self._converts = scheme is not None

    def join(self, tokens: Sequence[int], *, chunks: Sequence[int] = ()) -> tuple[int, mx.array]:
        """Seat a row, prefill it in chunks and convert it; return its slot and the last logits `(V,)`."""
        slot = self._batch.join(num_tokens=len(tokens))
        cuts = [0, *chunks, len(tokens)]
        logits = mx.zeros(())
        for start, stop in itertools.pairwise(cuts):
            logits = self.append((slot,), [tokens[start:stop]])[0, -1]
        mx.eval(logits)
        if self._converts:
            self._batch.convert(slot)
        return slot, logits

    def append(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> mx.array:
        """Append equally many tokens to rows and return logits `(B, T, V) float32`."""
        num_tokens = len(tokens[0])
        views = self._batch.view(slots, num_tokens)
        hidden = self._model.forward_hidden(mx.array([list(row) for row in tokens], dtype=mx.int32), views)
        self._batch.advance(slots, num_tokens)
        logits = self._model.logits_from_hidden(hidden).astype(mx.float32)
        mx.eval(logits)
        return logits

    def roll_back(self, slot: int, num_tokens: int) -> None:
        """Forget a row's last positions."""
        self._batch.set_end(slot, self._batch.end(slot) - num_tokens)


def deviation(left: mx.array, right: mx.array) -> float:
    """Return the largest difference of logits as a share of the largest; NaN where one is."""
    difference = mx.max(mx.abs(left - right)) / mx.maximum(mx.max(mx.abs(right)), 1.0)
    # A comparison of NaN with a tolerance is never true, so NaN fails.
    return float(cast("float", difference.item()))
