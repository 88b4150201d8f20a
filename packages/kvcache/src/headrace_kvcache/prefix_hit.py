"""What a prefix cache hands out: to rows, and to hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field, frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import Any, Self

    from headrace_kvcache.prefix_namespace import PrefixNamespace


@define(eq=False)
class PrefixHit:
    """A stored prefix, in caches of the caller's own.

    Attributes:
        tokens: what the caches hold: the first of the tokens that were asked for, never all of them.
        caches: one per layer, trimmed; use them as you like. They share bytes with the store until they are written.
        attachments: what was stored beside the entry; empty if the hit is a part of it, because what belongs to all of
            an entry's tokens is wrong for fewer.
    """

    tokens: tuple[int, ...]
    caches: list[Any]
    attachments: tuple[object, ...] = ()
    _on_release: Callable[[], None] | None = field(default=None, alias="on_release")

    @property
    def num_tokens(self) -> int:
        """How many tokens the caches hold."""
        return len(self.tokens)

    def release(self) -> None:
        """Unpin storage that the caches share; for entries in memory there is none. Idempotent."""
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@frozen(eq=False)
class PrefixView:
    """An entry as hooks see it.

    Attributes:
        tokens: what the caches hold.
        namespace: of the entry.
        session_id: of the `put` that stored it.
        caches: clones; while a hook keeps them, their bytes outlive the entry and are not billed.
    """

    tokens: tuple[int, ...]
    namespace: PrefixNamespace
    session_id: str | None
    caches: Sequence[Any]
