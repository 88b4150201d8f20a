"""What a prefix cache counts. Free of arrays."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from attrs import define, field, frozen

MissReason: TypeAlias = Literal["disabled", "no_namespace", "empty", "no_match", "too_short", "not_trimmable"]
RefusalReason: TypeAlias = Literal["disabled", "no_namespace", "too_short", "too_large"]


@frozen(kw_only=True)
class PrefixCacheStats:
    """A prefix cache's counters at one moment.

    Attributes:
        num_entries: entries held.
        num_bytes: bytes that they hold.
        max_bytes: the most bytes that they may hold.
        hits: calls of `take` that gave a prefix, from the cold store included.
        misses: calls of `take` that gave none, by reason: `disabled` (a cap of 0), `no_namespace`, `empty` (nothing
            is stored in the namespace), `no_match` (not even the first token), `too_short` (the common prefix or the
            prompt), `not_trimmable` (a common prefix that no entry can be trimmed to).
        num_tokens_reused: tokens of all hits.
        evictions: entries that left for lack of room, or beyond the limit of a session.
        refused_puts: calls of `put` that stored nothing, by reason.
        cold_hits: hits that came from the cold store.
        cold_errors: exceptions of the cold store; each meant no hit.
        hook_errors: exceptions of hooks.
    """

    num_entries: int
    num_bytes: int
    max_bytes: int
    hits: int
    misses: dict[MissReason, int]
    num_tokens_reused: int
    evictions: int
    refused_puts: dict[RefusalReason, int]
    cold_hits: int
    cold_errors: int
    hook_errors: int

    @property
    def num_misses(self) -> int:
        """All misses."""
        return sum(self.misses.values())


@define
class PrefixCounters:
    """The counters behind `PrefixCacheStats`."""

    hits: int = 0
    misses: dict[MissReason, int] = field(factory=lambda: dict.fromkeys(get_args(MissReason), 0))
    num_tokens_reused: int = 0
    evictions: int = 0
    refused_puts: dict[RefusalReason, int] = field(factory=lambda: dict.fromkeys(get_args(RefusalReason), 0))
    cold_hits: int = 0
    cold_errors: int = 0
    hook_errors: int = 0

    def stats(self, *, num_entries: int, num_bytes: int, max_bytes: int) -> PrefixCacheStats:
        """Return the counters as they stand."""
        return PrefixCacheStats(
            num_entries=num_entries,
            num_bytes=num_bytes,
            max_bytes=max_bytes,
            hits=self.hits,
            misses=dict(self.misses),
            num_tokens_reused=self.num_tokens_reused,
            evictions=self.evictions,
            refused_puts=dict(self.refused_puts),
            cold_hits=self.cold_hits,
            cold_errors=self.cold_errors,
            hook_errors=self.hook_errors,
        )
