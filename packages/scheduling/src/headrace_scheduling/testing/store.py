"""A prefix store in plain Python: a list of token tuples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_kvcache import PrefixNamespace


@frozen
class FakePrefixHit:
    """A stored prefix."""

    num_tokens: int
    caches: Sequence[Any]

    def release(self) -> None:
        return


class FakePrefixStore:
    """Keeps everything. What it stores are the tokens themselves, as `FakeStepRunner` copies them.

    Args:
        max_bytes: ignored.
        can_trim: whether an entry longer than the common prefix may be used.
        failing: names of the calls that raise.
    """

    def __init__(self, max_bytes: int = 0, *, can_trim: bool = True, failing: frozenset[str] = frozenset()) -> None:
        del max_bytes
        self.can_trim = can_trim
        self.failing = failing
        self.entries: list[tuple[PrefixNamespace, tuple[int, ...]]] = []

    @property
    def nbytes(self) -> int:
        return sum(len(tokens) for _, tokens in self.entries)

    def peek(self, tokens: Sequence[int], *, namespace: PrefixNamespace | None) -> int:
        self._maybe_fail("peek")
        return self._longest(tokens, namespace)

    def take(
        self, tokens: Sequence[int], *, namespace: PrefixNamespace | None, session_id: str | None = None
    ) -> FakePrefixHit | None:
        del session_id
        self._maybe_fail("take")
        length = self._longest(tokens, namespace)
        return FakePrefixHit(length, tuple(tokens[:length])) if length else None

    def held(self, tokens: Sequence[int], *, namespace: PrefixNamespace | None) -> int:
        self._maybe_fail("held")
        return self._held(tokens, namespace)

    def _held(self, tokens: Sequence[int], namespace: PrefixNamespace | None) -> int:
        lengths = [
            len(entry)
            for stored_namespace, entry in self.entries
            if stored_namespace == namespace and len(entry) < len(tokens) and tuple(tokens[: len(entry)]) == entry
        ]
        return max(lengths, default=0)

    def put(
        self,
        tokens: Sequence[int],
        caches: Sequence[Any],
        *,
        namespace: PrefixNamespace | None,
        session_id: str | None = None,
        first: int = 0,
    ) -> bool:
        del session_id
        self._maybe_fail("put")
        if tuple(caches) != tuple(tokens[first:]) or first > self._held(tokens, namespace):
            raise RuntimeError(f"caches of {len(caches)} tokens are stored under {len(tokens)} others, after {first}")
        if namespace is None:
            return False
        self.entries.append((namespace, tuple(tokens)))
        return True

    def _longest(self, tokens: Sequence[int], namespace: PrefixNamespace | None) -> int:
        best = 0
        for stored_namespace, entry in self.entries:
            if stored_namespace == namespace:
                length = _common(entry, tokens)
                usable = min(length, len(tokens) - 1)
                if usable == len(entry) or self.can_trim:
                    best = max(best, usable)
        return best

    def _maybe_fail(self, what: str) -> None:
        if what in self.failing:
            raise OSError(f"{what} fails as told")


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    for index, (ours, theirs) in enumerate(zip(first, second, strict=False)):
        if ours != theirs:
            return index
    return min(len(first), len(second))
