"""Entries of a prefix cache from caches, and caches from entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace_kvcache.clones import arrays_of, compacted, shortened
from headrace_kvcache.errors import IntegrityError
from headrace_kvcache.fields import SLAB
from headrace_kvcache.prefix_entries import PrefixEntry
from headrace_kvcache.radix_trie import TOKEN_BYTES
from headrace_kvcache.trims import least_length, num_tokens_held, trim_to

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_kvcache.prefix_namespace import PrefixNamespace


def make_entry(
    key: bytes,
    caches: Sequence[Any],
    *,
    namespace: PrefixNamespace,
    session_id: str | None,
    attachments: tuple[object, ...] = (),
) -> PrefixEntry:
    """Make an entry of compact twins of caches that hold exactly the tokens of a key; its arrays are lazy."""
    twins = compacted(caches)
    num_tokens = len(key) // TOKEN_BYTES
    return PrefixEntry(
        namespace=namespace,
        key=key,
        num_tokens=num_tokens,
        least_tokens=least_length(twins, num_tokens),
        caches=twins,
        num_bytes=_num_bytes(twins),
        session_id=session_id,
        attachments=attachments,
        sessions={session_id},
    )


def served_caches(caches: Sequence[Any], num_tokens: int) -> list[Any]:
    """Return clones trimmed to their first `num_tokens` positions, without the buffers' tails."""
    clones = [shortened(cache, num_tokens, step=SLAB) for cache in caches]
    trim_to(clones, num_tokens)
    return clones


def check_entry(entry: PrefixEntry) -> None:
    """Raise `IntegrityError` unless an entry holds the tokens of its key, in the bytes that it is billed."""
    held = {num_tokens_held(cache) for cache in entry.caches} - {None}
    if held != {entry.num_tokens} or len(entry.key) != entry.num_tokens * TOKEN_BYTES:
        raise IntegrityError(f"an entry of {entry.num_tokens} tokens has caches of {sorted(map(str, held))}")
    if entry.least_tokens != least_length(entry.caches, entry.num_tokens):
        raise IntegrityError(f"an entry of {entry.num_tokens} tokens cannot be trimmed to {entry.least_tokens}")
    if entry.num_bytes != _num_bytes(entry.caches):
        raise IntegrityError(f"an entry of {entry.num_tokens} tokens holds other bytes than it is billed")


def _num_bytes(caches: Sequence[Any]) -> int:
    return sum(array.nbytes for array in arrays_of(caches))
