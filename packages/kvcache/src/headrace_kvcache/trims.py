"""How many positions caches hold, and how few they can be brought to, whatever their kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from headrace_kvcache.chunked import ChunkedKVCache
from headrace_kvcache.composite import CacheList
from headrace_kvcache.converting import ConvertingCache
from headrace_kvcache.errors import IntegrityError, InvalidLength, InvalidPrefix, NotTrimmable, UnsupportedCache
from headrace_kvcache.recurrent import RecurrentCache
from headrace_kvcache.stored import StoredCache

if TYPE_CHECKING:
    from collections.abc import Sequence

# A class of mlx-lm that lowers its offset when trimmed and then appends behind what it should have forgotten.
_FALSELY_TRIMMABLE = frozenset({"ConcatenateKVCache"})


def is_cache(value: object) -> bool:
    """Return whether a value is a cache of one layer: of this package, or of another by mlx-lm's protocol."""
    own = isinstance(value, StoredCache | RecurrentCache | CacheList | ConvertingCache)
    return own or callable(getattr(type(value), "is_trimmable", None))


def num_tokens_held(cache: object) -> int | None:
    """Return how many positions a cache holds; None if it does not know: a recurrent cache that nobody advanced.

    Raises:
        InvalidPrefix: the caches of one layer disagree.
        UnsupportedCache: a cache of several rows, or no cache.
    """
    if isinstance(cache, RecurrentCache):
        return cache.offset or None
    if isinstance(cache, StoredCache | ConvertingCache):
        return cache.offset
    parts = parts_of(cache)
    if parts is not None:
        known = {each for each in map(num_tokens_held, parts) if each is not None}
        if len(known) > 1:
            raise InvalidPrefix(f"the caches of one layer hold {sorted(known)} positions; they must agree")
        return known.pop() if known else None
    offset: object = getattr(cache, "offset", None)
    if not is_cache(cache) or (offset is not None and type(offset) is not int):
        raise UnsupportedCache(f"a {type(cache).__name__} is no cache of a single row")
    return offset


def check_held(caches: Sequence[object], num_tokens: int) -> None:
    """Raise `InvalidPrefix` unless caches hold `num_tokens` positions.

    Every cache that knows how many it holds must say so. One that does not (recurrent layers of models that do not
    advance it) is believed beside one that does, because a forward feeds all layers; alone it is not.
    """
    if not caches:
        raise InvalidPrefix("caches is empty; hand over one cache per layer")
    known = [num_tokens_held(cache) for cache in caches]
    for layer, held in enumerate(known):
        if held is not None and held != num_tokens:
            raise InvalidPrefix(
                f"the cache of layer {layer} holds {held} positions, but {num_tokens} tokens are given as its key; "
                f"hand over exactly the tokens that were fed",
                layer,
            )
    if all(held is None for held in known):
        raise InvalidPrefix(
            f"none of the {len(known)} caches tells how many positions it holds, so a key of {num_tokens} tokens "
            f"cannot be checked; have the model call advance(T) on its recurrent caches"
        )


def least_length(caches: Sequence[object], num_tokens: int) -> int:
    """Return the fewest positions that caches of `num_tokens` positions can be trimmed to.

    They can be trimmed to every number from there on. It is `num_tokens` if they cannot be trimmed at all: a ring
    that is full, a recurrent state.
    """
    return max(_least_length(cache, num_tokens) for cache in caches)


def can_trim_to(caches: Sequence[object], num_tokens: int) -> bool:
    """Return whether `trim_to` works: every cache can be trimmed to its first `num_tokens` positions, or holds no more.

    Raises:
        InvalidPrefix: no cache tells how many positions it holds, or they disagree.
    """
    held = _num_tokens(caches)
    return type(num_tokens) is int and least_length(caches, held) <= num_tokens <= held


def trim_to(caches: Sequence[object], num_tokens: int) -> None:
    """Forget all but the first `num_tokens` positions, in all caches or in none.

    Raises:
        InvalidPrefix: no cache tells how many positions it holds, or they disagree.
        InvalidLength: a number that is not an integer from 0 to what is held.
        NotTrimmable: some cache cannot be brought to it.
    """
    held = _num_tokens(caches)
    if type(num_tokens) is not int or not 0 <= num_tokens <= held:
        raise InvalidLength(f"num_tokens is {num_tokens!r}; it must be an integer from 0 to the {held} that are held")
    least = least_length(caches, held)
    if num_tokens < least:
        raise NotTrimmable(f"caches of {held} positions cannot be trimmed to {num_tokens}, to {least} at least")
    if num_tokens == held:
        return
    for cache in caches:
        _forget(cache, held - num_tokens)
    if _num_tokens(caches) != num_tokens:
        raise IntegrityError(f"caches that were trimmed to {num_tokens} positions hold {_num_tokens(caches)}")


def _num_tokens(caches: Sequence[object]) -> int:
    known = [held for held in map(num_tokens_held, caches) if held is not None]
    check_held(caches, known[0] if known else 0)
    return known[0]


def parts_of(cache: object) -> Sequence[object] | None:
    """Return the caches that a list of caches consists of; None for other caches."""
    if isinstance(cache, CacheList):
        return cache.caches
    return cast("Sequence[object] | None", getattr(cache, "caches", None))


def is_falsely_trimmable(cache: object) -> bool:
    """Return whether a cache of another library calls itself trimmable and then keeps what it should have forgotten."""
    return type(cache).__name__ in _FALSELY_TRIMMABLE


def lost_front(cache: object) -> bool:
    """Return whether a chunked cache no longer holds the start of the chunk that its next position belongs to."""
    chunk = _chunk_of(cache)
    return chunk is not None and chunk.offset // chunk.size * chunk.size < chunk.first


def may_lose_front(cache: object, drafts: int) -> bool:
    """Return whether a foreign chunked cache that is fed drafts one by one forgets what it needs without them.

    It drops what is a whole chunk behind whenever it is fed, drafts included, and the pending token may be in the
    chunk before theirs.
    """
    chunk = _chunk_of(cache)
    if chunk is None:
        return False
    return (chunk.offset + 1) // chunk.size * chunk.size < max(chunk.first, chunk.offset + drafts - chunk.size)


class _Chunk(NamedTuple):
    offset: int
    first: int
    size: int


def _chunk_of(cache: object) -> _Chunk | None:
    numbers: list[Any] = [getattr(cache, name, None) for name in ("offset", "start_position", "chunk_size")]
    return _Chunk(*numbers) if all(type(number) is int for number in numbers) else None


def _least_length(cache: object, num_tokens: int) -> int:
    parts = parts_of(cache)
    if parts is not None:
        return max(_least_length(part, num_tokens) for part in parts)
    if isinstance(cache, ChunkedKVCache):
        return min(num_tokens, _whole_chunk(cache.start_position, cache.chunk_size))
    if is_falsely_trimmable(cache) or not _of(cache).is_trimmable():
        return num_tokens
    # mlx-lm's chunked cache calls itself trimmable also when the start of the chunk is gone.
    first, size = getattr(cache, "start_position", 0), getattr(cache, "chunk_size", 1)
    return min(num_tokens, _whole_chunk(first, size))


def _whole_chunk(first_held: int, chunk_size: int) -> int:
    return -(-first_held // chunk_size) * chunk_size


def _forget(cache: object, num_tokens: int) -> None:
    parts = parts_of(cache)
    if parts is None:
        _of(cache).trim(num_tokens)
        return
    # Part by part: a list refuses as a whole what each of its parts can do.
    for part in parts:
        _forget(part, num_tokens)


def _of(cache: object) -> Any:
    return cache
