"""The entries of a prefix cache: found by tokens, ordered by use, and counted in bytes. Free of arrays."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

from attrs import define, field

from headrace_kvcache.errors import IntegrityError
from headrace_kvcache.radix_trie import RadixTrie

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace_kvcache.prefix_namespace import PrefixNamespace
    from headrace_kvcache.prefix_segments import Segment

# An entry that more sessions than this have used belongs to all of them.
_MAX_NAMED_SESSIONS = 8


@define(eq=False, kw_only=True)
class PrefixEntry:
    """Caches of some tokens.

    Attributes:
        namespace: where it serves.
        key: its tokens, see `key_of`.
        num_tokens: how many these are.
        least_tokens: the fewest that its caches can be trimmed to.
        hollow: one cache per layer; those of linear layers are empty, because segments hold their positions.
        segments: what linear layers hold, in the order of positions; other entries may hold them too.
        rest_bytes: bytes of the layers that are not empty.
        session_id: of the `put` that stored it.
        attachments: what was stored beside it.
        sessions: who has stored or taken it; None for uses without a session, and for more sessions than are worth
            telling apart.
        last_use: on the logical clock.
    """

    namespace: PrefixNamespace
    key: bytes
    num_tokens: int
    least_tokens: int
    hollow: Sequence[Any]
    segments: list[Segment]
    rest_bytes: int
    session_id: str | None
    attachments: tuple[object, ...]
    sessions: set[str | None] = field(factory=set[str | None])
    last_use: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds, those included that it has in common with others."""
        return self.rest_bytes + sum(segment.num_bytes for segment in self.segments)

    @property
    def is_boundary(self) -> bool:
        """Whether it serves its exact tokens alone."""
        return self.least_tokens == self.num_tokens

    def is_only_of(self, session_id: str | None, tenant: str | None) -> bool:
        """Whether nobody else has used it; None stands for all uses without a session."""
        return self.namespace.tenant == tenant and self.sessions == {session_id}


class PrefixEntries:
    """Entries by namespace and tokens, the least recently used first."""

    def __init__(self) -> None:
        self._tries: dict[PrefixNamespace, RadixTrie[PrefixEntry]] = {}
        self._order: OrderedDict[PrefixEntry, None] = OrderedDict()
        self._clock = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[PrefixEntry]:
        """The entries, least recently used first; do not change them meanwhile."""
        return iter(self._order)

    def has(self, namespace: PrefixNamespace) -> bool:
        """Whether something is stored in a namespace."""
        return namespace in self._tries

    def matches(self, key: bytes, namespace: PrefixNamespace) -> Iterator[tuple[int, Iterator[PrefixEntry]]]:
        """Yield groups of entries by the number of tokens shared with a key, the most first."""
        trie = self._tries.get(namespace)
        return iter(()) if trie is None else trie.matches(key)

    def get(self, key: bytes, namespace: PrefixNamespace) -> PrefixEntry | None:
        """Return the entry of exactly these tokens."""
        trie = self._tries.get(namespace)
        return None if trie is None else trie.get(key)

    def ancestors(self, key: bytes, namespace: PrefixNamespace) -> list[PrefixEntry]:
        """Return the entries of strict prefixes."""
        trie = self._tries.get(namespace)
        return [] if trie is None else trie.ancestors(key)

    def add(self, entry: PrefixEntry) -> None:
        """Add an entry as the most recently used; none of its tokens must be there."""
        self._tries.setdefault(entry.namespace, RadixTrie()).insert(entry.key, entry)
        self._order[entry] = None
        self.num_bytes += entry.rest_bytes
        for segment in entry.segments:
            self._hold(segment)
        self.touch(entry)

    def touch(self, entry: PrefixEntry) -> None:
        """Make an entry the most recently used."""
        self._clock += 1
        entry.last_use = self._clock
        self._order.move_to_end(entry)

    def mark(self, entry: PrefixEntry, sessions: set[str | None]) -> None:
        """Note who uses an entry."""
        entry.sessions |= sessions
        if len(entry.sessions) > _MAX_NAMED_SESSIONS:
            entry.sessions = {None}

    def remove(self, entry: PrefixEntry) -> None:
        """Remove an entry."""
        trie = self._tries[entry.namespace]
        trie.remove(entry.key)
        if trie.is_empty:
            del self._tries[entry.namespace]
        del self._order[entry]
        self.num_bytes -= entry.rest_bytes
        for segment in entry.segments:
            self._let_go(segment)

    def replace_segment(self, segment: Segment, parts: Sequence[Segment]) -> None:
        """Let everybody who holds a segment hold these in its place."""
        for user in [entry for entry in self._order if segment in entry.segments]:
            at = user.segments.index(segment)
            user.segments[at : at + 1] = parts
            self._let_go(segment)
            for part in parts:
                self._hold(part)

    def _hold(self, segment: Segment) -> None:
        if not segment.num_users:
            self.num_bytes += segment.num_bytes
        segment.num_users += 1

    def _let_go(self, segment: Segment) -> None:
        segment.num_users -= 1
        if not segment.num_users:
            self.num_bytes -= segment.num_bytes

    def check_integrity(self) -> None:
        """Check that tries, order and bytes tell of the same entries.

        Raises:
            IntegrityError: they do not.
        """
        found: set[PrefixEntry] = set()
        for namespace, trie in self._tries.items():
            trie.check_integrity()
            if trie.is_empty:
                raise IntegrityError("a namespace without entries is kept")
            for key, entry in trie.items():
                if entry.key != key or entry.namespace != namespace:
                    raise IntegrityError(f"an entry of {entry.num_tokens} tokens lies under another key")
                found.add(entry)
        if found != set(self._order):
            raise IntegrityError(f"the tries hold {len(found)} entries and the order {len(self._order)}")
        self._check_bytes()
        uses = [entry.last_use for entry in self._order]
        if uses != sorted(set(uses)):
            raise IntegrityError("the order of use is not that of the clock")

    def _check_bytes(self) -> None:
        users = Counter(segment for entry in self._order for segment in entry.segments)
        if any(segment.num_users != count for segment, count in users.items()):
            raise IntegrityError("a segment is held by more or fewer entries than it says")
        total = sum(entry.rest_bytes for entry in self._order) + sum(segment.num_bytes for segment in users)
        if self.num_bytes != total:
            raise IntegrityError(f"the entries add up to {total} bytes, not to the {self.num_bytes} of the books")
