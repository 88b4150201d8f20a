"""The free part before a grammar: text or token ids up to and including a marker.

A Knuth-Morris-Pratt automaton (1977) over bytes or ids follows how much of the marker the end of the free part has.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class FreePrefix:
    """Follows tokens until the marker is complete. State 0 is the start, `end` is past the marker.

    Args:
        marker: text as bytes, or token ids.
        tokens: the bytes of each token; needed for a text only.
    """

    def __init__(self, marker: bytes | Sequence[int], tokens: Sequence[bytes] = ()) -> None:
        self._units: Sequence[int] = marker
        self._tokens = tokens if isinstance(marker, bytes) else None
        self.end = len(marker)
        self._borders = _borders(marker)
        self._closed: dict[int, tuple[int, ...]] = {}
        self._leading: dict[int, tuple[int, ...]] = {}
        self._sorted: list[tuple[bytes, int]] | None = None

    def step(self, state: int, token_id: int) -> int:
        """Return the state after a token."""
        for unit in self._tokens[token_id] if self._tokens is not None else (token_id,):
            while state and self._units[state] != unit:
                state = self._borders[state - 1]
            state += self._units[state] == unit
            if state == self.end:
                break
        return state

    def closed(self, state: int) -> Iterable[int]:
        """Return tokens that hold the end of the marker and more, which the grammar would never see."""
        if self._tokens is None:
            return ()
        found = self._closed.get(state)
        if found is None:
            found = self._closed[state] = tuple(self._crossing(state, self._tokens))
        return found

    def leading(self, state: int) -> Iterable[int]:
        """Return the tokens that write nothing but the marker's next part."""
        if self._tokens is None:
            return (self._units[state],)
        found = self._leading.get(state)
        if found is None:
            rest = bytes(self._units)[state:]
            found = tuple(token_id for token_id, text in enumerate(self._tokens) if text and rest.startswith(text))
            self._leading[state] = found
        return found

    def _crossing(self, state: int, tokens: Sequence[bytes]) -> list[int]:
        marker = bytes(self._units)
        if self._sorted is None:
            self._sorted = sorted((text, token_id) for token_id, text in enumerate(tokens))
        crossing = {
            token_id for token_id, text in enumerate(tokens) if -1 < text.find(marker) < len(text) - len(marker)
        }
        while state:
            rest = marker[state:]
            for text, token_id in self._sorted[bisect_left(self._sorted, (rest, -1)) :]:
                if not text.startswith(rest):
                    break
                if len(text) > len(rest):
                    crossing.add(token_id)
            state = self._borders[state - 1]
        return sorted(crossing)


def _borders(units: Sequence[int]) -> list[int]:
    """Return the length of the longest proper prefix that is a suffix, of each prefix."""
    borders = [0] * len(units)
    length = 0
    for place in range(1, len(units)):
        while length and units[place] != units[length]:
            length = borders[length - 1]
        length += units[place] == units[length]
        borders[place] = length
    return borders
