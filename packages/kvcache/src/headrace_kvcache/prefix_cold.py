"""What a prefix cache asks of a store behind it, an SSD tier for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from headrace_kvcache.errors import IntegrityError
from headrace_kvcache.trims import check_held

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_kvcache.prefix_namespace import PrefixNamespace


class ColdHit(Protocol):
    """A prefix that a cold store has found."""

    @property
    def tokens(self) -> Sequence[int]:
        """All tokens of the stored entry."""
        ...

    @property
    def num_tokens(self) -> int:
        """How many of them serve: a prefix of what was asked for that the entry can be trimmed to."""
        ...


class ColdStore(Protocol):
    """Stored prefixes outside memory. It may raise anything: that means no hit, and is counted."""

    def find(self, tokens: Sequence[int], namespace: PrefixNamespace) -> ColdHit | None:
        """Return the longest prefix of `tokens` that the store can serve, not read yet; no side effects."""
        ...

    def load(self, hit: ColdHit) -> object:
        """Read a hit into host memory; makes no arrays, so that any thread may call it."""
        ...

    def adopt(self, loaded: Any) -> Sequence[Any]:
        """Make caches that hold all tokens of the entry, one per layer, on the thread of the caller."""
        ...


class ColdTier:
    """A cold store as a prefix cache asks it; there may be none.

    Args:
        store: the store, or None.
    """

    __slots__ = ("_store",)

    def __init__(self, store: ColdStore | None) -> None:
        self._store = store

    @property
    def is_there(self) -> bool:
        """Whether there is a store."""
        return self._store is not None

    def find(
        self, tokens: Sequence[int], namespace: PrefixNamespace, *, least: int
    ) -> tuple[ColdHit | None, Exception | None]:
        """Return a hit of `least` tokens or more and fewer than all; and what the store raised, which is no hit."""
        if self._store is None:
            return None, None
        try:
            found = self._store.find(tokens, namespace)
            is_useful = found is not None and least <= found.num_tokens < len(tokens)
        except Exception as error:  # noqa: BLE001 - a cold store may raise anything
            return None, error
        return (found if is_useful else None), None

    def load(self, found: ColdHit, tokens: Sequence[int]) -> tuple[tuple[int, ...], Sequence[Any]]:
        """Return all tokens of a hit's entry, and caches that hold them; raises whatever the store raises.

        Raises:
            IntegrityError: the entry does not begin with the tokens that it was found for.
            InvalidPrefix: the caches hold something else.
        """
        assert self._store is not None
        stored, length = tuple(found.tokens), found.num_tokens
        if stored[:length] != tuple(tokens[:length]):
            raise IntegrityError(f"a cold entry of {len(stored)} tokens does not begin with the {length} asked for")
        caches = self._store.adopt(self._store.load(found))
        check_held(caches, len(stored))
        return stored, caches
