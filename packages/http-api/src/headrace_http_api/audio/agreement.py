"""What of a growing transcript is stable: the words in which two transcriptions in a row agree.

Local agreement of two hypotheses, after Macháček, Dabre and Bojar (2023), "Turning Whisper into Real-Time
Transcription System". Differs in that words are compared without case and punctuation, that the youngest wait although
two agree in them, and that a hypothesis that repeats what is stable word for word is matched by its words before its
times are asked.
"""

import re
from collections.abc import Sequence
from itertools import takewhile

from attrs import define, field

from headrace_http_api.audio_ports import TimedWord

__all__ = ["Agreement", "text_of"]

# A hypothesis may repeat so many of the last stable words with wrong times.
MAX_REPEATED = 5

_EDGES = re.compile(r"^\W+|\W+$")


def text_of(words: Sequence[TimedWord]) -> str:
    """Return words as text, each with the space that is before it."""
    return "".join(word.text for word in words)


@define
class Agreement:
    """Words that never change, and the words that may.

    Attributes:
        stable: of what is not final yet, in order. Grows at its end; only `release` takes from its beginning.
        tentative: what the last hypothesis says beyond them.
    """

    stable: list[TimedWord] = field(factory=list[TimedWord])
    tentative: list[TimedWord] = field(factory=list[TimedWord])
    _released: list[TimedWord] = field(factory=list[TimedWord])

    def update(self, hypothesis: Sequence[TimedWord], settled_s: float) -> list[TimedWord]:
        """Take a transcription of the audio since the last release.

        Args:
            settled_s: words that end later stay tentative; too little is heard of what follows them.

        Returns:
            The words that have become stable: those that the hypothesis before has too.
        """
        following = self._beyond_stable(hypothesis)
        common = following[: _num_common(self.tentative, following)]
        agreed = list(takewhile(lambda word: word.end_s <= settled_s, common))
        self.stable += agreed
        self.tentative = following[len(agreed) :]
        return agreed

    def settle(self) -> None:
        """Let all that was said be stable: it will not be heard again."""
        self.stable += self.tentative
        self.tentative = []

    def release(self, count: int) -> list[TimedWord]:
        """Take the first stable words out: they are final, and their audio is not heard again."""
        released, self.stable = self.stable[:count], self.stable[count:]
        self._released = (self._released + released)[-MAX_REPEATED:]
        return released

    def forget(self) -> None:
        """Let nothing that was said be taken for a repetition: what follows is apart from it."""
        self._released = []

    def _beyond_stable(self, hypothesis: Sequence[TimedWord]) -> list[TimedWord]:
        said = [*self._released, *self.stable]
        if not said:
            return list(hypothesis)
        if self.stable and _num_common(self.stable, hypothesis) == len(self.stable):
            return list(hypothesis[len(self.stable) :])
        end_s = said[-1].end_s
        rest = [word for word in hypothesis if (word.start_s + word.end_s) / 2 > end_s]
        for count in range(min(MAX_REPEATED, len(said), len(rest)), 0, -1):
            if _num_common(said[-count:], rest) == count:
                return rest[count:]
        return rest


def _num_common(first: Sequence[TimedWord], second: Sequence[TimedWord]) -> int:
    count = 0
    for a, b in zip(first, second, strict=False):
        if _plain(a.text) != _plain(b.text):
            break
        count += 1
    return count


def _plain(text: str) -> str:
    """Return a word without case and punctuation around it; punctuation alone stays."""
    return _EDGES.sub("", text).casefold() or text.strip()
