"""What all single-row caches of keys and values have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx

from headrace_kvcache.errors import EmptyCache, IntegrityError, InvalidGeometry, InvalidLength
from headrace_kvcache.fields import SLAB, check_pair, check_same_layer, fresh, num_bytes
from headrace_kvcache.geometry import check_appended
from headrace_kvcache.rounds import RoundBooks, check_drafts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_kvcache.forms import Fields, StoredForm
    from headrace_kvcache.masks import Mask

Side: TypeAlias = "mx.array | tuple[mx.array, ...] | None"


class StoredCache(ABC):
    """Keys and values of one layer in a stored form.

    It speaks mlx-lm's cache protocol, so that mlx-lm generates with it, and offers `attend` to models that leave
    masks to the cache. `update_and_fetch` returns plain arrays whatever the form is, and no attribute is named
    `bits`: mlx-lm's models would take that for a promise of packed triples, which sinks and latent attention break.

    Attributes:
        offset: number of positions appended and not trimmed, the same for every row of the arrays.
    """

    step = SLAB

    def __init__(self, form: StoredForm) -> None:
        self._form = form
        self._fields: Fields | None = None
        self._round = RoundBooks()
        self.offset = 0

    @property
    def form(self) -> StoredForm:
        """How keys and values are stored."""
        return self._form

    @property
    def keys(self) -> Side:
        """The buffer of the keys: `(B, H, C, D)`, or the arrays of the stored form; None while nothing is held."""
        return self._side(slice(None, self._form.num_key_fields))

    @keys.setter
    def keys(self, keys: Side) -> None:
        self._set_sides(keys, self.values)

    @property
    def values(self) -> Side:
        """The buffer of the values, as `keys`."""
        return self._side(slice(self._form.num_key_fields, None))

    @values.setter
    def values(self, values: Side) -> None:
        self._set_sides(self.keys, values)

    def _side(self, which: slice) -> Side:
        if self._fields is None:
            return None
        side = self._fields[which]
        return side[0] if len(side) == 1 else side

    def _set_sides(self, keys: Side, values: Side) -> None:
        self._fields = None if keys is None or values is None else (*_as_fields(keys), *_as_fields(values))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `keys (B, H, T, D)` and `values (B, H, T, Dv)` and return what queries at these positions may see.

        The returned arrays are views: drop them before the next append, or that append copies the buffers.

        Raises:
            InvalidGeometry: other rows, heads, sizes or dtypes than before.
        """
        check_pair(keys, values)
        self._form.check(keys, values)
        added = self._form.encode(keys, values)
        check_same_layer(self._fields, added, keys, values)
        self._append(added, keys.shape[2])
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what the last append returned, `(B, H, L, D)` and `(B, H, L, Dv)`.

        Raises:
            EmptyCache: nothing was appended yet.
        """
        return self._form.decode(self._held())

    def attend(
        self,
        queries: mx.array,
        keys: mx.array | None,
        values: mx.array | None,
        *,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """Append and attend, see `attend`."""
        if keys is not None and values is not None:
            check_appended(queries, keys, values)
            self._form.check(keys, values)
            added = self._form.encode(keys, values)
            check_same_layer(self._fields, added, keys, values)
            self._append(added, keys.shape[2])
        elif keys is not None or values is not None:
            raise InvalidGeometry("keys and values must be given together, or both be None to attend without appending")
        elif self._fields is None:
            raise EmptyCache("the cache holds nothing yet; append keys and values first")
        self._check_holds(queries.shape[2])
        fields, mask = self._seen(queries.shape[2], window)
        return self._form.attention(queries, fields, scale=scale, mask=mask, sinks=sinks, softcap=softcap)

    def _check_holds(self, num_tokens: int) -> None:
        if num_tokens > self._num_whole():
            raise EmptyCache(
                f"{num_tokens} queries without keys need as many held positions; the cache holds all that is to see "
                f"for its last {self._num_whole()}"
            )

    def _num_whole(self) -> int:
        """Return how many of the last positions still have all that they see."""
        return self.offset

    @abstractmethod
    def _append(self, added: Fields, num_tokens: int) -> None:
        """Store checked fields."""

    @abstractmethod
    def _held(self) -> Fields:
        """Return the columns that the last append made visible; raise `EmptyCache` if there was none."""

    @abstractmethod
    def _seen(self, num_tokens: int, window: int | None) -> tuple[Fields, Mask]:
        """Return the columns that the last `num_tokens` positions see, and the mask over these columns."""

    @abstractmethod
    def make_mask(self, num_tokens: int, *, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Return the mask that mlx-lm's models ask for before they append `num_tokens` positions.

        Returns:
            None if nothing is masked, `"causal"`, or a boolean `(num_tokens, L)` over what the append will return.
        """

    @abstractmethod
    def trim(self, num_tokens: int) -> int:
        """Forget the last `num_tokens` positions, at most all, and return how many were forgotten.

        Raises:
            InvalidLength: a negative number, or not an integer.
            NotTrimmable: what the earlier positions need is gone.
        """

    @abstractmethod
    def is_trimmable(self) -> bool:
        """Return whether any number of positions can be forgotten now."""

    # ---- rounds ------------------------------------------------------------------------------------------------

    @property
    def is_in_round(self) -> bool:
        """Whether a round of speculation is open."""
        return self._round.is_open

    def spec_round_fits(self, drafts: int) -> bool:
        """Return True: a round keeps what it needs, wherever the cache stands.

        Raises:
            InvalidCountError: `drafts` is not an integer of at least 0.
        """
        check_drafts(drafts)
        return True

    def spec_round_begin(self) -> None:
        """Open a round: what is appended until its end can be forgotten again.

        Raises:
            RoundRefusedError: a round is open.
        """
        self._round.begin({0: self.offset})

    def spec_round_commit(self) -> None:
        """Keep everything that was appended since `spec_round_begin`.

        Raises:
            RoundRefusedError: no round is open.
        """
        self._round.close()

    def spec_round_rollback(self, keep: int) -> None:
        """Keep the first `keep` positions that were appended since `spec_round_begin`: pending and accepted ones.

        Raises:
            RoundRefusedError: no round is open.
            InvalidCountError: a count that is not from 0 to what was appended.
        """
        end = self._round.targets(keep, {0: self.offset})[0]
        self._forget_from(end)
        self._round.close()

    @abstractmethod
    def _forget_from(self, end: int) -> None:
        """Forget the positions of the open round from `end` on."""

    def check_integrity(self) -> None:
        """Check the books against the buffers, without evaluating anything.

        Raises:
            IntegrityError: they disagree.
        """
        if self._fields is None:
            if self.offset:
                raise IntegrityError(f"the cache is at {self.offset}, but holds no buffers")
            return
        shapes = {field.shape[:3] for field in self._fields}
        if len(shapes) != 1:
            raise IntegrityError(f"the buffers differ in rows, heads or columns: {sorted(shapes)}")
        [(_, _, num_columns)] = shapes
        if not 0 <= self._num_stored() <= num_columns:
            raise IntegrityError(
                f"a cache at {self.offset} stores {self._num_stored()} columns, its buffers have {num_columns}"
            )

    def _num_stored(self) -> int:
        """Return how many columns of the buffers hold something."""
        return self.offset

    @property
    @abstractmethod
    def state(self) -> object:
        """Everything that a twin needs, in array objects of its own; drop it before the next append."""

    def size(self) -> int:
        """Return the number of positions held."""
        return self.offset

    def empty(self) -> bool:
        """Return whether nothing was ever appended."""
        return self._fields is None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers allocated now."""
        return num_bytes(self._fields)

    def _sides(self) -> tuple[Side, Side]:
        """Return keys and values in new array objects, for `state`."""
        if self._fields is None:
            return None, None
        fields, count = fresh(self._fields), self._form.num_key_fields
        keys, values = fields[:count], fields[count:]
        return (keys[0] if len(keys) == 1 else keys), (values[0] if len(values) == 1 else values)


def _as_fields(side: mx.array | Sequence[mx.array]) -> Fields:
    return (side,) if isinstance(side, mx.array) else tuple(side)


def check_count(num_tokens: int) -> None:
    """Raise `InvalidLength` unless the number is an integer of at least 0."""
    if type(num_tokens) is not int or num_tokens < 0:
        raise InvalidLength(f"num_tokens is {num_tokens!r}; it must be an integer of at least 0")
