"""Runs of positions that entries of a prefix cache have in common, held once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define

from headrace_kvcache.clones import arrays_of
from headrace_kvcache.fields import fresh, part, slabs, with_room, write
from headrace_kvcache.linear import LinearCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_kvcache.forms import Fields
    from headrace_kvcache.stored import Side

# Below this, and below a quarter of what has to be copied for it, sharing costs more than it saves.
MIN_SHARED_TOKENS = 256
_LEAST_SHARE = 4


@define(eq=False)
class Segment:
    """Positions one after the other, in every layer whose column p is position p. Never changed, only replaced.

    Attributes:
        num_tokens: how many positions.
        fields: per layer, `(B, H, C, ...)` with C at least `num_tokens`.
        num_users: how many entries hold it; not which, so that no cycle keeps its bytes alive.
    """

    num_tokens: int
    fields: tuple[Fields, ...]
    num_users: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for fields in self.fields for array in fields)

    def split(self, num_tokens: int) -> tuple[Segment, Segment]:
        """Return its first positions and the others, in arrays of their own; layer by layer, so that memory holds."""
        firsts: list[Fields] = []
        seconds: list[Fields] = []
        for fields in self.fields:
            firsts.append(_copied(fields, 0, num_tokens))
            seconds.append(_copied(fields, num_tokens, self.num_tokens))
            mx.eval(firsts[-1], seconds[-1])
        return Segment(num_tokens, tuple(firsts)), Segment(self.num_tokens - num_tokens, tuple(seconds))

    def after(self, num_tokens: int) -> Segment:
        """Return all but its first positions in arrays of their own, lazily."""
        fields = tuple(_copied(fields, num_tokens, self.num_tokens) for fields in self.fields)
        return Segment(self.num_tokens - num_tokens, fields)

    def extended(self, more: Segment) -> Segment:
        """Return a segment of its positions and then those of another, lazily.

        They are written behind its own, in place if nobody else holds the arrays. Where these have no room for them, an
        eighth more than needed is allocated: a conversation that goes on copies its history once in many turns.
        """
        end = self.num_tokens + more.num_tokens
        longer: list[Fields] = []
        for held, added in zip(self.fields, more.fields, strict=True):
            new = part(added, 0, more.num_tokens)
            fields = with_room(fresh(held), new, used=self.num_tokens, end=end, capacity=slabs(end + end // 8))
            write(fields, new, self.num_tokens)
            longer.append(fields)
        return Segment(end, tuple(longer))

    def fits(self, other: Segment) -> bool:
        """Whether two segments are of the same layers of a model, in the same form."""
        return _geometry(self) == _geometry(other)


def taken_out(caches: Sequence[Any], num_tokens: int) -> tuple[list[Any], Segment]:
    """Return caches of so many positions with the linear layers empty, and what these held: a segment of all."""
    hollow: list[Any] = []
    held: list[Fields] = []
    for cache in caches:
        if is_linear(cache):
            keys, values, _, *numbers = cache.state
            held.append((*_as_fields(keys), *_as_fields(values)))
            hollow.append(type(cache).from_state((None, None, 0, *numbers)))
        else:
            hollow.append(cache)
    return hollow, Segment(num_tokens, tuple(held))


def put_back(hollow: Sequence[Any], segments: Sequence[Segment], num_tokens: int) -> list[Any]:
    """Return caches with the first `num_tokens` positions of segments in the layers that are empty for them.

    Of one segment, arrays are shared, without columns beyond whole slabs; those of several are joined, lazily.
    """
    parts = _parts(segments, num_tokens)
    caches: list[Any] = []
    layer = 0
    for cache in hollow:
        if not is_linear(cache):
            caches.append(cache)
            continue
        numbers = cache.state
        fields = _joined([(segment.fields[layer], count, segment.num_tokens) for segment, count in parts])
        keys, values = fields[: cache.form.num_key_fields], fields[cache.form.num_key_fields :]
        caches.append(type(cache).from_state((_as_side(keys), _as_side(values), num_tokens, *numbers[3:])))
        layer += 1
    return caches


def lead(segments: Sequence[Segment], num_tokens: int) -> tuple[list[Segment], tuple[Segment, int] | None]:
    """Return the segments within the first `num_tokens` positions, and the one that goes on beyond, with its share."""
    whole: list[Segment] = []
    for segment, count in _parts(segments, num_tokens):
        if count < segment.num_tokens:
            return whole, (segment, count)
        whole.append(segment)
    return whole, None


def pays(num_shared: int, num_tokens: int, straddled: tuple[Segment, int] | None) -> bool:
    """Whether sharing so many of an entry's tokens is worth the copies that it takes: its own rest, and of a split."""
    copied = max(num_tokens - num_shared, 0 if straddled is None else straddled[0].num_tokens)
    return num_shared >= MIN_SHARED_TOKENS and num_shared * _LEAST_SHARE >= copied


def is_linear(cache: object) -> bool:
    """Whether a cache is one of this package's whose column p is position p."""
    return isinstance(cache, LinearCache)


def rest_bytes(hollow: Sequence[Any]) -> int:
    """Return the bytes of the layers that no segment holds."""
    return sum(array.nbytes for array in arrays_of(hollow))


def _parts(segments: Sequence[Segment], num_tokens: int) -> list[tuple[Segment, int]]:
    found: list[tuple[Segment, int]] = []
    left = num_tokens
    for segment in segments:
        if left <= 0:
            break
        found.append((segment, min(left, segment.num_tokens)))
        left -= segment.num_tokens
    return found


def _joined(parts: Sequence[tuple[Fields, int, int]]) -> Fields:
    if len(parts) == 1:
        ((fields, count, whole),) = parts
        # Whole slabs, so that a first append copies little more than what serves.
        return fields if count == whole else tuple(each[..., : slabs(count), :] for each in fields)
    pieces = zip(*([each[..., :count, :] for each in fields] for fields, count, _ in parts), strict=True)
    return tuple(mx.concatenate(list(each), axis=2) for each in pieces)


def _copied(fields: Fields, start: int, stop: int) -> Fields:
    return tuple(mx.contiguous(each[..., start:stop, :]) for each in fields)


def _geometry(segment: Segment) -> list[object]:
    return [(each.shape[:2], each.shape[3], each.dtype, len(fields)) for fields in segment.fields for each in fields]


def _as_fields(side: Side) -> Fields:
    if side is None:
        return ()
    return (side,) if isinstance(side, mx.array) else side


def _as_side(fields: Fields) -> Side:
    return fields[0] if len(fields) == 1 else fields
