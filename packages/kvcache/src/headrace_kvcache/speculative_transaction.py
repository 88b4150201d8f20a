"""The life of a round of speculation over all layers: begun in all, ended in all, or the state is invalid for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

from headrace_kvcache.errors import IntegrityError, InvalidCountError, RoundRefusedError, StateInvalidError
from headrace_kvcache.rounds import check_drafts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Acceptance = TypeVar("Acceptance")
# How many of a round's positions stay, in all rows or per row; None for all of them.
Keep: TypeAlias = "int | Sequence[int] | None"


class RoundLayer(Protocol):
    """One layer's part in a round."""

    def fits(self, drafts: int) -> bool:
        """Return whether a round of that many drafts can be rolled back now."""
        ...

    def begin(self, drafts: int) -> None:
        """Get ready for a step of the pending token and the drafts."""
        ...

    def resolve(self, keep: Keep, drafts: int) -> None:
        """Keep the pending token and what was accepted."""
        ...

    @property
    def is_open(self) -> bool | None:
        """Whether the layer is in a round; None if it keeps no books of rounds."""
        ...


class SpeculativeTransaction(Generic[Acceptance]):
    """Rounds over a model's caches: `begin(drafts)`, one forward over pending token and drafts, `resolve(accepted)`.

    Made by `bind_cache_rollback` (`Acceptance` is a number) or `bind_row_cache_rollback` (a number per row). After
    `resolve` the caches hold what they would hold if the rejected drafts had never been made. A caller that gets
    `InvalidCountError` from `resolve` has a defect: the round stays open, but what it should keep is unknown, so it
    should discard the caches.

    Args:
        layers: each layer's part.
        keep_of: what an acceptance of a number of drafts keeps; raises `InvalidCountError` unless the two fit.
    """

    __slots__ = ("_drafts", "_fault", "_keep_of", "_layers")

    def __init__(self, layers: Sequence[RoundLayer], keep_of: Callable[[Acceptance, int], Keep]) -> None:
        self._layers = tuple(layers)
        self._keep_of = keep_of
        self._drafts: int | None = None
        # Words only: an exception would keep its frames and so the caches alive.
        self._fault: str | None = None

    @property
    def drafts(self) -> int | None:
        """The drafts of the open round; None if no round is open."""
        return self._drafts

    @property
    def is_valid(self) -> bool:
        """Whether no layer has failed in the middle of a round."""
        return self._fault is None

    def can_begin(self, drafts: int) -> bool:
        """Return whether `begin(drafts)` would begin: no round is open, and every layer can take the drafts back.

        Ask before each round: a foreign ring fits no more drafts as it nears its wrap.

        Raises:
            StateInvalidError: a layer failed earlier.
            InvalidCountError: `drafts` is not an integer of at least 0.
        """
        self._check_valid()
        check_drafts(drafts)
        return self._drafts is None and all(layer.fits(drafts) for layer in self._layers)

    def begin(self, drafts: int) -> None:
        """Open a round, before the forward over the pending token and `drafts` drafts.

        Raises:
            StateInvalidError: a layer failed earlier.
            InvalidCountError: `drafts` is not an integer of at least 0.
            RoundRefusedError: a round is open, or a layer cannot take the drafts back; nothing has changed.
            Exception: whatever a layer raised; the state is invalid from now on.
        """
        if not self.can_begin(drafts):
            reason = "a round is open; resolve it first" if self._drafts is not None else self._unfit(drafts)
            raise RoundRefusedError(f"a round of {drafts} drafts cannot begin: {reason}")
        self._drafts = drafts
        try:
            for layer in self._layers:
                layer.begin(drafts)
        except BaseException as error:
            self._fail("begin", error)
            raise

    def resolve(self, accepted: Acceptance) -> None:
        """End the open round: keep the pending token and the accepted drafts, forget the others.

        Raises:
            StateInvalidError: a layer failed earlier.
            InvalidCountError: no round is open, or the acceptance does not fit its drafts: the round stays open.
            Exception: whatever a layer raised; the state is invalid from now on.
        """
        self._check_valid()
        drafts = self._drafts
        if drafts is None:
            raise InvalidCountError(f"accepted is {accepted!r}, but no round is open; call begin(drafts) first")
        keep = self._keep_of(accepted, drafts)
        try:
            for layer in self._layers:
                layer.resolve(keep, drafts)
        except BaseException as error:
            self._fail("resolve", error)
            raise
        self._drafts = None

    def check_integrity(self) -> None:
        """Check that the layers are in a round exactly if the transaction is; an invalid state is not judged.

        Raises:
            IntegrityError: a layer was begun or ended by somebody else.
        """
        if self._fault is not None:
            return
        for index, layer in enumerate(self._layers):
            # A round without drafts may leave a layer as it is.
            if layer.is_open is not None and layer.is_open and self._drafts is None:
                raise IntegrityError(f"layer {index} is in a round that the transaction has not begun")
            if layer.is_open is False and self._drafts:
                raise IntegrityError(f"layer {index} has left the open round of {self._drafts} drafts")

    def _unfit(self, drafts: int) -> str:
        unfit = [index for index, layer in enumerate(self._layers) if not layer.fits(drafts)]
        return f"layers {unfit} could not take the drafts back; decode without drafts, or with fewer"

    def _fail(self, call: str, error: BaseException) -> None:
        self._fault = f"a layer raised {type(error).__name__} in {call}"

    def _check_valid(self) -> None:
        if self._fault is not None:
            raise StateInvalidError(f"{self._fault}, so the caches must be discarded")
