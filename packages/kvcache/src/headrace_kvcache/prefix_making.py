"""Entries of a prefix cache from caches, and caches from entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace_kvcache.clones import arrays_of, clone_caches, compacted, shortened
from headrace_kvcache.errors import IntegrityError, InvalidLength, InvalidPrefix
from headrace_kvcache.fields import SLAB
from headrace_kvcache.prefix_entries import PrefixEntry
from headrace_kvcache.prefix_segments import is_linear, lead, pays, put_back, rest_bytes, taken_out
from headrace_kvcache.radix_trie import TOKEN_BYTES
from headrace_kvcache.trims import check_held, least_length, num_tokens_held, trim_to

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from headrace_kvcache.prefix_entries import PrefixEntries
    from headrace_kvcache.prefix_namespace import PrefixNamespace
    from headrace_kvcache.prefix_segments import Segment


def make_entry(
    key: bytes,
    caches: Sequence[Any],
    *,
    namespace: PrefixNamespace,
    session_id: str | None,
    attachments: tuple[object, ...] = (),
    lead: Sequence[Segment] = (),
) -> PrefixEntry:
    """Make an entry of compact twins of caches that hold exactly the tokens of a key; its arrays are lazy.

    Of the linear layers the segments `lead` hold the first tokens, and the caches the others.

    Raises:
        InvalidPrefix: the segments are of another model or in another form than the caches.
    """
    twins = compacted(caches)
    num_tokens = len(key) // TOKEN_BYTES
    least_tokens = least_length(twins, num_tokens)
    hollow, segment = taken_out(twins, num_tokens - sum(each.num_tokens for each in lead))
    if not all(segment.fits(each) for each in lead):
        raise InvalidPrefix(
            "the caches do not fit the entry that they go on from; they must be of the same model and form"
        )
    return PrefixEntry(
        namespace=namespace,
        key=key,
        num_tokens=num_tokens,
        least_tokens=least_tokens,
        hollow=hollow,
        segments=[*lead, segment],
        rest_bytes=rest_bytes(hollow),
        session_id=session_id,
        attachments=attachments,
        sessions={session_id},
    )


def share(entry: PrefixEntry, other: PrefixEntry, num_shared: int, entries: PrefixEntries) -> bool:
    """Let a new entry hold its first tokens in the segments of another that has them, if that pays.

    The new entry's own rest is copied, lazily. A segment of the other that goes on beyond them is split for all of its
    users, which copies it.

    Args:
        entry: not in the books yet, in one segment.
        other: in the books.
        num_shared: how many first tokens the two have in common.
        entries: the books.
    """
    (own,) = entry.segments
    whole, straddled = lead(other.segments, num_shared)
    if not own.fields or not own.fits(other.segments[0]) or not pays(num_shared, entry.num_tokens, straddled):
        return False
    if straddled is not None:
        segment, count = straddled
        parts = segment.split(count)
        entries.replace_segment(segment, parts)
        whole.append(parts[0])
    entry.segments = [*whole, own.after(num_shared)] if num_shared < entry.num_tokens else whole
    return True


def extend(entry: PrefixEntry, max_bytes: int) -> None:
    """Let an entry that goes on from another hold its last segments as one, if that one is nobody else's any more.

    Lazily, and only if the room that comes with it fits `max_bytes`.
    """
    *others, last, own = entry.segments
    if last.num_users:
        return
    longer = last.extended(own)
    if entry.num_bytes - last.num_bytes - own.num_bytes + longer.num_bytes <= max_bytes:
        entry.segments = [*others, longer]


def arrays_in(entry: PrefixEntry) -> list[mx.array]:
    """Return every array of an entry."""
    held = [array for segment in entry.segments for fields in segment.fields for array in fields]
    return arrays_of(entry.hollow) + held


def served_caches(entry: PrefixEntry, num_tokens: int) -> list[Any]:
    """Return clones of an entry's caches with their first `num_tokens` positions, without the buffers' tails."""
    if num_tokens == entry.num_tokens:
        clones = clone_caches(entry.hollow)
    else:
        clones = [shortened(cache, num_tokens, step=SLAB) for cache in entry.hollow]
        rest = [cache for cache in clones if not is_linear(cache)]
        if rest:
            trim_to(rest, num_tokens)
    return put_back(clones, entry.segments, num_tokens)


def check_rest(caches: Sequence[Any], num_tokens: int, first: int) -> None:
    """Raise unless caches hold `num_tokens` positions, linear ones all but the `first` ones.

    Raises:
        InvalidPrefix: they hold something else.
        InvalidLength: `first` is not an integer from 0 to below `num_tokens`.
    """
    if type(first) is not int or not 0 <= first < num_tokens:
        raise InvalidLength(f"first is {first!r}; it must be an integer from 0 to below the {num_tokens} tokens")
    if not first:
        check_held(caches, num_tokens)
        return
    check_held([cache for cache in caches if is_linear(cache)], num_tokens - first)
    known = [cache for cache in caches if not is_linear(cache) and num_tokens_held(cache) is not None]
    if known:
        check_held(known, num_tokens)


def check_entry(entry: PrefixEntry) -> None:
    """Raise `IntegrityError` unless an entry holds the tokens of its key, in the bytes that it is billed."""
    caches = served_caches(entry, entry.num_tokens)
    held = {num_tokens_held(cache) for cache in caches} - {None}
    if held != {entry.num_tokens} or len(entry.key) != entry.num_tokens * TOKEN_BYTES:
        raise IntegrityError(f"an entry of {entry.num_tokens} tokens has caches of {sorted(map(str, held))}")
    if sum(segment.num_tokens for segment in entry.segments) != entry.num_tokens:
        raise IntegrityError(f"the segments of an entry do not add up to its {entry.num_tokens} tokens")
    if entry.least_tokens != least_length(caches, entry.num_tokens):
        raise IntegrityError(f"an entry of {entry.num_tokens} tokens cannot be trimmed to {entry.least_tokens}")
    if entry.rest_bytes != rest_bytes(entry.hollow):
        raise IntegrityError(f"an entry of {entry.num_tokens} tokens holds other bytes than it is billed")
