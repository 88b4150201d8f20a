"""The slots of a loaded model under its KV scheme, or the one seat of a model whose caches cannot share any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx

from headrace_kvcache import (
    KVCache,
    KVScheme,
    QuantizedKVCache,
    UnsupportedCache,
    cache_spec_of,
    first_chunk_length,
    make_prompt_cache,
    make_row_batch,
    make_slot_prototypes,
)
from headrace_scheduling.lone_seat import LoneSeat
from headrace_scheduling.steps import CacheTraits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace_kvcache import CacheSpec
    from headrace_scheduling.ports import RuntimeModel
    from headrace_scheduling.steps import SharedPrefix

KV_SCHEME_NOT_BATCHABLE = "kv-scheme-not-batchable"
CACHES_CANNOT_SHARE_SLOTS = "caches-cannot-share-slots"

_TRIMMABLE = (KVCache, QuantizedKVCache)


class SlotBatch(Protocol):
    """What a runner asks of slots: `headrace_kvcache.ModelRowBatch`, or `LoneSeat`."""

    @property
    def nbytes(self) -> int: ...
    def join(self, *, num_tokens: int = 0) -> int: ...
    def join_caches(self, caches: Sequence[object], *, num_tokens: int = 0) -> int: ...
    def leave(self, slot: int) -> None: ...
    def end(self, slot: int) -> int: ...
    def view(self, slots: Sequence[int], num_tokens: int, *, lengths: Sequence[int] | None = None) -> list[Any]: ...
    def advance(self, slots: Sequence[int], num_tokens: int | Sequence[int]) -> None: ...
    def extract(self, slot: int, *, first: int = 0) -> list[Any]: ...
    def convert(self, slot: int) -> None: ...


class Seats:
    """Slots that can be thrown away and made anew.

    Attributes:
        batch: the slots.
        traits: what they can do.
        scheme: how they store keys and values.
        serial_reasons: why rows do not share steps; empty if they do.
    """

    def __init__(
        self,
        make_batch: Callable[[], SlotBatch],
        traits: CacheTraits,
        scheme: KVScheme,
        serial_reasons: tuple[str, ...] = (),
    ) -> None:
        self._make_batch = make_batch
        self.batch = make_batch()
        self.traits = traits
        self.scheme = scheme
        self.serial_reasons = serial_reasons

    def join(self, num_tokens: int, prefix: SharedPrefix | None) -> int:
        """Seat a row that begins with a prefix, of which it gets its own copy; return its slot."""
        if prefix is None:
            return self.batch.join(num_tokens=num_tokens)
        slot = self.batch.join_caches(prefix.caches, num_tokens=num_tokens)
        if self.batch.end(slot) != prefix.num_tokens:
            end = self.batch.end(slot)
            self.batch.leave(slot)
            raise RuntimeError(f"a prefix of {prefix.num_tokens} tokens holds {end} positions; it is not used")
        return slot

    def copy(self, slot: int, num_tokens: int, *, first: int = 0) -> list[Any]:
        """Copy a row's positions from `first` up to `num_tokens` into single-row caches of their own."""
        end = self.batch.end(slot)
        if num_tokens > end or ((first or num_tokens < end) and not self.traits.can_trim):
            raise RuntimeError(f"a copy of {num_tokens} positions is asked of a row that holds {end}")
        caches = self.batch.extract(slot, first=first)
        for cache in caches:
            if num_tokens < end:
                cache.trim(end - num_tokens)
        return caches

    def reset(self) -> None:
        """Drop every row and buffer."""
        self.batch = self._make_batch()


def make_seats(model: RuntimeModel, scheme: KVScheme | None, *, max_rows: int) -> Seats:
    """Make the slots of a model: as many as `max_rows`, or one if its caches cannot share steps.

    Raises:
        InvalidScheme: the scheme names a layer that can never be stored as it says.
        UnsupportedCache: the model makes a cache that is not known here.
    """
    scheme = KVScheme.unquantized() if scheme is None else scheme
    converts = scheme.kind != "unquantized"
    if scheme.start:
        return _lone(model, scheme, KV_SCHEME_NOT_BATCHABLE)
    try:
        prototypes = make_slot_prototypes(model, scheme=scheme)
        make_row_batch(prototypes, max_rows=max_rows, starts_unquantized=converts)
    except UnsupportedCache:
        return _lone(model, scheme, KV_SCHEME_NOT_BATCHABLE if converts else CACHES_CANNOT_SHARE_SLOTS)
    traits = CacheTraits(
        can_trim=all(isinstance(cache, _TRIMMABLE) for cache in prototypes),
        first_chunk=_first_chunk if converts else None,
    )

    def make_batch() -> SlotBatch:
        return make_row_batch(prototypes, max_rows=max_rows, starts_unquantized=converts)

    return Seats(make_batch, traits, scheme)


def _lone(model: RuntimeModel, scheme: KVScheme, reason: str) -> Seats:
    def make_caches() -> list[Any]:
        return list(make_prompt_cache(model, scheme=scheme))

    return Seats(lambda: LoneSeat(make_caches), CacheTraits(can_trim=False), scheme, (reason,))


def _first_chunk(num_prompt_tokens: int, boundary: int | None) -> int:
    return first_chunk_length(num_prompt_tokens, boundary=boundary)


def measure_cache_spec(model: RuntimeModel) -> CacheSpec:
    """Describe a model's caches by putting one token through it."""
    caches = make_prompt_cache(model)
    mx.eval(model.forward_hidden(mx.array([[0]], dtype=mx.int32), caches))
    return cache_spec_of(caches)
