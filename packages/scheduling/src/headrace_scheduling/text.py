"""From a row's tokens to its final text: incremental decoding, then stop strings over the decoded text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_scheduling.events import TextDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_scheduling.ports import TokenDecoder


class TextStream:
    """The text of one row as it becomes final. The result does not depend on how the text was cut into tokens.

    Text that may be the beginning of a stop string is held back. The match that starts first wins, the shortest of
    those that start together; the match and all that follows it are never delivered.

    Attributes:
        matched_stop: the stop string that matched; None until one did.
    """

    def __init__(self, decoder: TokenDecoder, stop: tuple[str, ...] = ()) -> None:
        self._decoder = decoder
        # Shortest first: of two that start together the shorter one is complete first.
        self._stop = tuple(sorted((text for text in stop if text), key=len))
        self._first_characters = frozenset(text[0] for text in self._stop)
        self._max_held = len(self._stop[-1]) - 1 if self._stop else 0
        self._held = ""
        self.matched_stop: str | None = None

    @property
    def has_stops(self) -> bool:
        """Whether a stop string may end the text."""
        return bool(self._stop)

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the next tokens and return what they made final; no text after a match."""
        if self.matched_stop is not None:
            return TextDelta("", tuple(token_ids))
        text = self._decoder.push(token_ids)
        return TextDelta(self._release(text) if self._stop else text, tuple(token_ids))

    def flush(self) -> TextDelta:
        """End the row and return the text that was held back, cut at a stop string that it completes."""
        if self.matched_stop is not None:
            return TextDelta("")
        text = self._release(self._decoder.flush(), is_end=True)
        return TextDelta(text)

    def _release(self, text: str, *, is_end: bool = False) -> str:
        held = self._held + text
        match_at, stop = self._find(held)
        open_at = len(held) if is_end else self._first_open(held)
        if stop is not None and match_at <= open_at:
            self.matched_stop = stop
            self._held = ""
            return held[:match_at]
        self._held = held[open_at:]
        return held[:open_at]

    def _find(self, held: str) -> tuple[int, str | None]:
        """Return the first complete match in `held`, or its length and None."""
        best: tuple[int, str | None] = (len(held), None)
        for stop in self._stop:
            index = held.find(stop)
            if 0 <= index < best[0]:
                best = (index, stop)
        return best

    def _first_open(self, held: str) -> int:
        """Return where the earliest unfinished match may start, or the length of `held`."""
        for index in range(max(0, len(held) - self._max_held), len(held)):
            if held[index] in self._first_characters:
                tail = held[index:]
                if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stop):
                    return index
        return len(held)
