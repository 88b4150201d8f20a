"""The scheduler's side of stored prefixes: what a row may begin with, and what it leaves behind."""

from __future__ import annotations

from logging import getLogger
from typing import TYPE_CHECKING

from attrs import define, field

from headrace_scheduling.faults import log_fault
from headrace_scheduling.sharing import MIN_SHARED
from headrace_scheduling.steps import SharedPrefix

if TYPE_CHECKING:
    from headrace_scheduling.ports import PrefixStore
    from headrace_scheduling.steps import RowSpec

_logger = getLogger(__name__)


@define
class Prefixes:
    """A prefix store that can fail without harm: then there is no hit, or nothing is stored (design D12).

    Attributes:
        store: None to keep no prefixes.
        num_hits, num_misses: rows that began with a stored prefix, and rows that could have but did not.
        num_faults: calls in which the store raised.
    """

    store: PrefixStore | None
    num_hits: int = field(default=0, init=False)
    num_misses: int = field(default=0, init=False)
    num_faults: int = field(default=0, init=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of stored prefixes."""
        return 0 if self.store is None else self.store.nbytes

    def serves(self, spec: RowSpec) -> bool:
        """Whether a row takes from the store and adds to it."""
        return self.store is not None and spec.namespace is not None

    def peek(self, spec: RowSpec) -> int:
        """Return how many tokens `take` would give."""
        if self.store is None or spec.namespace is None:
            return 0
        try:
            return self.store.peek(spec.prompt_ids, namespace=spec.namespace)
        except Exception as error:  # noqa: BLE001 - a store may raise anything, and never harms a row
            self._count_fault("looking up a prefix failed", error)
            return 0

    def take(self, spec: RowSpec) -> SharedPrefix | None:
        """Return the longest stored prefix of a row's prompt."""
        if self.store is None or spec.namespace is None:
            return None
        try:
            hit = self.store.take(spec.prompt_ids, namespace=spec.namespace, session_id=spec.session_id)
        except Exception as error:  # noqa: BLE001 - as above
            self._count_fault("taking a prefix failed", error)
            hit = None
        if hit is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        return SharedPrefix(num_tokens=hit.num_tokens, caches=hit.caches, release=hit.release)

    def held(self, spec: RowSpec, tokens: tuple[int, ...]) -> int:
        """Return how many first tokens of what a row computed are stored, and need not be copied to be stored again."""
        if self.store is None or spec.namespace is None:
            return 0
        try:
            return self.store.held(tokens, namespace=spec.namespace)
        except Exception as error:  # noqa: BLE001 - as above
            self._count_fault("looking up what is stored failed", error)
            return 0

    def put(self, spec: RowSpec, tokens: tuple[int, ...], prefix: SharedPrefix) -> None:
        """Store what a row computed; the key is exactly what the caches hold."""
        if self.store is None or spec.namespace is None or not prefix.is_converted or len(tokens) < MIN_SHARED:
            return
        if prefix.num_tokens != len(tokens):
            _logger.error("a prefix of %d tokens is named %d; it is not stored", prefix.num_tokens, len(tokens))
            return
        try:
            self.store.put(
                tokens, prefix.caches, namespace=spec.namespace, session_id=spec.session_id, first=prefix.first
            )
        except Exception as error:  # noqa: BLE001 - as above
            self._count_fault("storing a prefix failed", error)

    def _count_fault(self, what: str, error: Exception) -> None:
        self.num_faults += 1
        log_fault(_logger, what, error)
