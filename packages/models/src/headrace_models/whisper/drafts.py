"""What a row may write, told in advance: an earlier transcript of the same audio, or of its beginning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Draft"]

# A longer proposal would cost more than it saves when it is wrong early.
_MOST = 64


@define
class Draft:
    """Tokens, and how far a row has come in them.

    A row that leaves its draft finds back where the draft goes on with the token that was written last, or further on
    where it has the last two in a row: one alone would be found in too many places, and what is proposed in vain costs
    as much as three tokens.
    """

    tokens: tuple[int, ...]
    _left_at: int = 0
    _tried_at: int = 0

    def follow(self, written: Sequence[int], room: int) -> tuple[int, ...]:
        """Return what may follow what the row has written, at most `room` tokens; nothing if the row is not here."""
        place = self._find(written)
        if place is None:
            return ()
        self._tried_at = place + 1
        return self.tokens[self._tried_at : self._tried_at + min(room, _MOST)]

    def note(self, num_accepted: int) -> None:
        """Take the row for being where it was told to go on, if it wrote any of what was proposed."""
        if num_accepted:
            self._left_at = self._tried_at + num_accepted

    def _find(self, written: Sequence[int]) -> int | None:
        """Return the place of the token that was written last."""
        if self.tokens[self._left_at : self._left_at + 1] == (written[-1],):
            return self._left_at
        last = tuple(written[-2:])
        places = range(self._left_at + 1, len(self.tokens))
        return next((place for place in places if self.tokens[place - 1 : place + 1] == last), None)
