"""The ids that replies were really generated as, for when their texts come back in the next prompt."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock

from attrs import define, field

__all__ = ["MAX_CHARS", "MAX_ENTRIES", "TokenHistory"]

MAX_CHARS = 2**21
MAX_ENTRIES = 16

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@define
class TokenHistory:
    """Conversations as they were fed and generated, least recently used first. Thread-safe.

    A model may spell a text with other tokens than the tokenizer does, and then a resent reply would miss what the
    prefix cache holds. Nothing here is trusted: ids are used only if they decode to the very prompt.

    Attributes:
        encode: text to ids, without start tokens of the tokenizer's own.
        decode: ids to text, special tokens shown.
        max_chars: characters that all entries together may have.
        max_entries: number of conversations.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    max_chars: int = field(default=MAX_CHARS, kw_only=True)
    max_entries: int = field(default=MAX_ENTRIES, kw_only=True)
    _entries: OrderedDict[str, tuple[int, ...]] = field(init=False, factory=OrderedDict[str, tuple[int, ...]])
    _num_chars: int = field(init=False, default=0)
    _lock: Lock = field(init=False, factory=Lock, repr=False)

    def remember(self, token_ids: Sequence[int]) -> None:
        """Store a prompt with the reply generated after it, unless its text is too long or ends in half a character."""
        text = self.decode(token_ids)
        if not text or text.endswith(_REPLACEMENT) or len(text) > self.max_chars:
            return
        with self._lock:
            if self._entries.pop(text, None) is not None:
                self._num_chars -= len(text)
            self._entries[text] = tuple(token_ids)
            self._num_chars += len(text)
            while self._num_chars > self.max_chars or len(self._entries) > self.max_entries:
                oldest, _ = self._entries.popitem(last=False)
                self._num_chars -= len(oldest)

    def resolve(self, rendered: str, canonical: list[int]) -> list[int]:
        """Return the ids of a rendered prompt that agree with what was generated, or the canonical ones."""
        found = self._longest_prefix(rendered)
        if found is None:
            return canonical
        text, stored = found
        if tuple(canonical[: len(stored)]) == stored:
            return canonical
        resolved = [*stored, *self.encode(rendered[len(text) :])]
        return resolved if self.decode(resolved) == rendered else canonical

    def _longest_prefix(self, rendered: str) -> tuple[str, tuple[int, ...]] | None:
        with self._lock:
            texts = [text for text in self._entries if len(text) < len(rendered) and rendered.startswith(text)]
            if not texts:
                return None
            longest = max(texts, key=len)
            self._entries.move_to_end(longest)
            return longest, self._entries[longest]
