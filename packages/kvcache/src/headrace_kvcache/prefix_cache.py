"""Stored prefixes: caches of tokens that a later prompt may begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from headrace_kvcache.errors import IntegrityError, InvalidLength, InvalidPrefix
from headrace_kvcache.prefix_cold import ColdTier
from headrace_kvcache.prefix_entries import PrefixEntries
from headrace_kvcache.prefix_faults import log_fault
from headrace_kvcache.prefix_hit import PrefixHit, PrefixView
from headrace_kvcache.prefix_making import arrays_in, check_entry, check_rest, extend, make_entry, served_caches, share
from headrace_kvcache.prefix_stats import PrefixCounters
from headrace_kvcache.radix_trie import TOKEN_BYTES, key_of, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from headrace_kvcache.prefix_cold import ColdHit, ColdStore
    from headrace_kvcache.prefix_entries import PrefixEntry
    from headrace_kvcache.prefix_namespace import PrefixNamespace
    from headrace_kvcache.prefix_segments import Segment
    from headrace_kvcache.prefix_stats import MissReason, PrefixCacheStats, RefusalReason


class PrefixCache:
    """Keeps caches by the tokens they hold, within a number of bytes; the least recently used leave first.

    Entries own their bytes, and hold those of a long common beginning once. `put` shares the caller's buffers where
    these are compact and copies them where they are mostly room or a view of something larger; `take` copies nothing,
    but joins what an entry holds in several segments. After either, both sides may go on: a buffer that is still shared
    is copied by the side that writes first.

    Used by one thread, the one that evaluates the arrays. A lookup costs a comparison of bytes per edge of a radix
    trie, and a look at the entries that share the most tokens.

    Args:
        max_bytes: the most bytes that entries may hold; 0 stores nothing.
        min_tokens: the least length of a hit; shorter prefixes are neither given nor stored.
        max_boundaries: the most entries of one conversation that serve their exact tokens alone (full rings, recurrent
            states), so that it does not fill the store. A conversation is a session; without one, the entries that are
            beginnings of each other. Entries that other sessions use too do not count.
        on_put: called with each entry that a `put` has stored.
        on_evict: called with each entry that left for lack of room; not for replaced, superseded or closed ones.
            A hook that raises is logged and harms nothing.
        cold: a store behind this one, asked for what would be strictly longer.

    Raises:
        InvalidLength: a number that is not an integer, or out of its range.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        min_tokens: int = 32,
        max_boundaries: int = 4,
        on_put: Callable[[PrefixView], object] | None = None,
        on_evict: Callable[[PrefixView], object] | None = None,
        cold: ColdStore | None = None,
    ) -> None:
        self._max_bytes = _at_least("max_bytes", max_bytes, 0)
        self._min_tokens = _at_least("min_tokens", min_tokens, 1)
        self._max_boundaries = _at_least("max_boundaries", max_boundaries, 1)
        self._on_put, self._on_evict = on_put, on_evict
        self._cold = ColdTier(cold)
        self._entries = PrefixEntries()
        self._counters = PrefixCounters()

    # ---- facts -------------------------------------------------------------------------------------------------

    @property
    def max_bytes(self) -> int:
        """The most bytes that entries may hold."""
        return self._max_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that entries hold now."""
        return self._entries.num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def views(self) -> Iterator[PrefixView]:
        """Yield every entry, the least recently used first; do not change the cache meanwhile."""
        for entry in self._entries:
            yield _view(entry)

    def stats(self) -> PrefixCacheStats:
        """Return the counters as they stand."""
        entries = self._entries
        return self._counters.stats(num_entries=len(entries), num_bytes=entries.num_bytes, max_bytes=self._max_bytes)

    # ---- taking ------------------------------------------------------------------------------------------------

    def peek(self, tokens: Sequence[int], *, namespace: PrefixNamespace | None) -> int:
        """Return how many tokens `take` would give, without side effects; the cold store is believed.

        Raises:
            InvalidPrefix: tokens that are not integers.
        """
        if namespace is None or not self._max_bytes or len(tokens) <= self._min_tokens:
            return 0
        found, _ = self._find(key_of(tokens[:-1]), namespace)
        length = 0 if found is None else found[1]
        cold, _ = self._cold.find(tokens, namespace, least=max(length + 1, self._min_tokens))
        return length if cold is None else cold.num_tokens

    def holds(self, tokens: Sequence[int], *, namespace: PrefixNamespace) -> bool:
        """Return whether there is an entry of exactly these tokens; no side effects."""
        return self._entries.get(key_of(tokens), namespace) is not None

    def held(self, tokens: Sequence[int], *, namespace: PrefixNamespace | None) -> int:
        """Return how many first tokens of these an entry holds, such that `put` can go on from it; no side effects.

        Raises:
            InvalidPrefix: tokens that are not integers.
        """
        if namespace is None:
            return 0
        ancestors = self._entries.ancestors(key_of(tokens), namespace)
        return max((entry.num_tokens for entry in ancestors if entry.segments[0].fields), default=0)

    def take(
        self, tokens: Sequence[int], *, namespace: PrefixNamespace | None, session_id: str | None = None
    ) -> PrefixHit | None:
        """Return the longest stored prefix of a prompt; it stays stored.

        It is never all of `tokens`, because a forward of at least one gives the logits. An entry that holds more than
        it shares with the prompt serves if all its caches can be trimmed. Among equally long ones the session's own
        go first, then the most recently used.

        Returns:
            A hit with clones, or None.

        Raises:
            InvalidPrefix: tokens that are not integers.
        """
        reason: MissReason | None = None
        if not self._max_bytes:
            reason = "disabled"
        elif namespace is None:
            reason = "no_namespace"
        elif len(tokens) <= self._min_tokens:
            reason = "too_short"
        if reason is not None or namespace is None:
            return self._miss(reason or "no_namespace")
        key = key_of(tokens[:-1])
        found, reason = self._find(key, namespace, session_id)
        hit = self._take_cold(tokens, namespace, session_id, 0 if found is None else found[1])
        if hit is None:
            if self._cold.is_there:
                # A cold entry that failed while it was brought in may have cost the one that was found.
                found, reason = self._find(key, namespace, session_id)
            if found is None:
                return self._miss(reason)
            hit = self._hit(found[0], tokens[: found[1]], session_id)
        self._counters.hits += 1
        self._counters.num_tokens_reused += hit.num_tokens
        return hit

    def _find(
        self, key: bytes, namespace: PrefixNamespace, session_id: str | None = None
    ) -> tuple[tuple[PrefixEntry, int] | None, MissReason]:
        """Return the entry that serves most of a key, with its length; and if there is none, why."""
        reason: MissReason = "no_match" if self._entries.has(namespace) else "empty"
        for num_shared, entries in self._entries.matches(key, namespace):
            if num_shared < self._min_tokens:
                return None, "too_short" if reason == "no_match" else reason
            serving = [entry for entry in entries if entry.least_tokens <= num_shared]
            if serving:
                best = max(serving, key=lambda entry: (_is_of(entry, session_id), entry.last_use))
                return (best, num_shared), reason
            reason = "not_trimmable"
        return None, reason

    def _hit(self, entry: PrefixEntry, tokens: Sequence[int], session_id: str | None) -> PrefixHit:
        self._entries.touch(entry)
        self._entries.mark(entry, {session_id})
        is_whole = len(tokens) == entry.num_tokens
        return PrefixHit(tuple(tokens), served_caches(entry, len(tokens)), entry.attachments if is_whole else ())

    def _miss(self, reason: MissReason) -> None:
        self._counters.misses[reason] += 1

    def _take_cold(
        self, tokens: Sequence[int], namespace: PrefixNamespace, session_id: str | None, length: int
    ) -> PrefixHit | None:
        found, error = self._cold.find(tokens, namespace, least=max(length + 1, self._min_tokens))
        if error is not None:
            self._counters.cold_errors += 1
            log_fault("looking into the cold prefix store failed, there is no hit from it", error)
        return None if found is None else self._thaw(found, tokens, namespace, session_id)

    def _thaw(
        self, found: ColdHit, tokens: Sequence[int], namespace: PrefixNamespace, session_id: str | None
    ) -> PrefixHit | None:
        """Return a hit of what the cold store has, which from now on is here too if it has room."""
        try:
            stored, caches = self._cold.load(found, tokens)
            length = found.num_tokens
            entry = make_entry(key_of(stored), caches, namespace=namespace, session_id=session_id)
            hit = PrefixHit(tuple(tokens[:length]), served_caches(entry, length))
            if entry.num_bytes <= self._max_bytes:
                self._tell(self._on_evict, self._store(entry))
        except Exception as error:  # noqa: BLE001 - whatever a cold store raises or gives means no hit
            self._counters.cold_errors += 1
            log_fault("the cold prefix store failed, there is no hit from it", error)
            return None
        self._counters.cold_hits += 1
        return hit

    # ---- putting -----------------------------------------------------------------------------------------------

    def put(
        self,
        tokens: Sequence[int],
        caches: Sequence[Any],
        *,
        namespace: PrefixNamespace | None,
        session_id: str | None = None,
        attachments: Sequence[object] = (),
        first: int = 0,
    ) -> bool:
        """Store clones of caches that hold exactly `tokens`, and evaluate them; the caller's own stay the caller's.

        An entry of the same tokens is replaced. Entries of strict prefixes go if the new one can be trimmed to them,
        because it serves in their place. Then the least recently used leave until there is room.

        What goes on from an entry needs no copy of what that holds: with `first`, caches whose column p is position p
        (plain, quantized, TurboQuant) hold the positions from there on, and all others everything.

        Args:
            tokens: what was fed to the caches, nothing less and nothing more.
            caches: one per layer. Recurrent ones that nobody advanced do not know what they hold: they are believed
                beside one that does.
            namespace: where the entry serves; None stores nothing.
            session_id: the conversation it belongs to.
            attachments: small things to hand out with it; their bytes are not billed.
            first: how many first tokens come from an entry: 0, or what `held` said.

        Returns:
            Whether it was stored: not with a cap of 0, without a namespace, below `min_tokens`, or above the cap.

        Raises:
            InvalidPrefix: caches that hold something else, or none that tells; tokens that are not integers; no entry
                of the first `first` tokens, or one of another form.
            InvalidLength: `first` is not an integer from 0 to below the number of tokens.
            UnsupportedCache: something that is no single-row cache.
        """
        if not self._max_bytes:
            return self._refuse("disabled")
        if namespace is None:
            return self._refuse("no_namespace")
        if len(tokens) < self._min_tokens:
            return self._refuse("too_short")
        key = key_of(tokens)
        check_rest(caches, len(tokens), first)
        entry = make_entry(
            key,
            caches,
            namespace=namespace,
            session_id=session_id,
            attachments=tuple(attachments),
            # No name for it: whoever holds the segments makes writing behind them a copy.
            lead=self._lead(key, namespace, first),
        )
        if entry.num_bytes > self._max_bytes:
            return self._refuse("too_large")
        evicted = self._store(entry)
        self._tell(self._on_evict, evicted)
        self._tell(self._on_put, [entry])
        return True

    def _store(self, entry: PrefixEntry) -> list[PrefixEntry]:
        """Make room, evaluate and add; return what had to leave for it."""
        self._replace(entry)
        if len(entry.segments) > 1:
            extend(entry, self._max_bytes)
        else:
            self._share(entry)
        self._entries.add(entry)
        # Before the copies exist, so that the books hold at every moment.
        evicted = self._evict_to(self._max_bytes, but=entry)
        try:
            mx.eval(arrays_in(entry))
        except BaseException:
            self._entries.remove(entry)
            raise
        return evicted + self._bound(entry)

    def _lead(self, key: bytes, namespace: PrefixNamespace, num_tokens: int) -> list[Segment]:
        """Return what holds the first tokens of a key."""
        if not num_tokens:
            return []
        entry = self._entries.get(key[: num_tokens * TOKEN_BYTES], namespace)
        if entry is None or not entry.segments[0].fields:
            raise InvalidPrefix(
                f"first is {num_tokens}, but no entry of so many tokens can be gone on from; ask held()"
            )
        return list(entry.segments)

    def _share(self, entry: PrefixEntry) -> None:
        """Let an entry hold what it has in common with another in the same bytes."""
        for num_shared, entries in self._entries.matches(entry.key, entry.namespace):
            share(entry, next(entries), num_shared, self._entries)
            return

    def _replace(self, entry: PrefixEntry) -> None:
        """Remove what the entry serves in place of; who used that uses the entry."""
        same = self._entries.get(entry.key, entry.namespace)
        ancestors = self._entries.ancestors(entry.key, entry.namespace)
        superseded = [each for each in ancestors if entry.least_tokens <= each.num_tokens]
        for each in superseded if same is None else [same, *superseded]:
            self._entries.mark(entry, each.sessions)
            self._entries.remove(each)

    def _bound(self, entry: PrefixEntry) -> list[PrefixEntry]:
        """Remove what a conversation holds beyond its number of boundaries, the least recently used first."""
        if not entry.is_boundary:
            return []
        own = [each for each in self._conversation(entry) if each.is_boundary]
        beyond = [each for each in own[: max(0, len(own) - self._max_boundaries)] if each is not entry]
        self._drop(beyond)
        return beyond

    def _conversation(self, entry: PrefixEntry) -> list[PrefixEntry]:
        """Return the entries that only an entry's session has used; without one, those of the turns before it.

        An entry that another conversation goes on from is used again and again, and so is none of the oldest.
        """
        session_id, tenant = entry.session_id, entry.namespace.tenant
        own = [each for each in self._entries if each.is_only_of(session_id, tenant)]
        if session_id is not None:
            return own
        chain = {entry, *self._entries.ancestors(entry.key, entry.namespace)}
        return [each for each in own if each in chain]

    def _refuse(self, reason: RefusalReason) -> bool:
        self._counters.refused_puts[reason] += 1
        return False

    def _tell(self, hook: Callable[[PrefixView], object] | None, entries: Iterable[PrefixEntry]) -> None:
        if hook is None:
            return
        for entry in entries:
            try:
                hook(_view(entry))
            except Exception as error:  # noqa: BLE001 - a hook never fails what it watches
                self._counters.hook_errors += 1
                log_fault("a hook of the prefix cache failed", error)

    # ---- leaving -----------------------------------------------------------------------------------------------

    def evict_to(self, num_bytes: int) -> int:
        """Evict the least recently used until entries hold at most `num_bytes`; return how many bytes left.

        Raises:
            InvalidLength: a negative number, or not an integer.
        """
        before = self.nbytes
        self._tell(self._on_evict, self._evict_to(_at_least("num_bytes", num_bytes, 0)))
        return before - self.nbytes

    def _evict_to(self, num_bytes: int, *, but: PrefixEntry | None = None) -> list[PrefixEntry]:
        left: list[PrefixEntry] = []
        for entry in list(self._entries):
            if self._entries.num_bytes <= num_bytes:
                break
            # What an entry has in common with others stays with them.
            if entry is not but:
                self._drop([entry])
                left.append(entry)
        return left

    def _drop(self, leaving: Iterable[PrefixEntry]) -> None:
        for entry in leaving:
            self._entries.remove(entry)
            self._counters.evictions += 1

    def close_session(self, session_id: str, *, tenant: str | None = None) -> int:
        """Drop the entries that only this session has used, and return how many; the others forget it.

        Args:
            session_id: of the conversation that has ended.
            tenant: whose session it is: equal ids of two tenants are two sessions.
        """
        closed = [entry for entry in self._entries if entry.is_only_of(session_id, tenant)]
        for entry in closed:
            self._entries.remove(entry)
        for entry in self._entries:
            if entry.namespace.tenant == tenant:
                entry.sessions.discard(session_id)
        return len(closed)

    def clear(self) -> None:
        """Drop every entry; the counters stay."""
        # One by one: nodes of a trie hold each other, and would keep the bytes until the collector comes.
        for entry in list(self._entries):
            self._entries.remove(entry)

    def check_integrity(self) -> None:
        """Check the books, and that every entry holds the tokens of its key in the bytes that it is billed.

        Raises:
            IntegrityError: they do not.
        """
        self._entries.check_integrity()
        if self.nbytes > self._max_bytes:
            raise IntegrityError(f"entries hold {self.nbytes} bytes; the cap is {self._max_bytes}")
        for entry in self._entries:
            check_entry(entry)


def _view(entry: PrefixEntry) -> PrefixView:
    return PrefixView(tokens_of(entry.key), entry.namespace, entry.session_id, served_caches(entry, entry.num_tokens))


def _is_of(entry: PrefixEntry, session_id: str | None) -> bool:
    return session_id is not None and session_id in entry.sessions


def _at_least(name: str, value: int, least: int) -> int:
    if type(value) is not int or value < least:
        raise InvalidLength(f"{name} is {value!r}; it must be an integer of at least {least}")
    return value
