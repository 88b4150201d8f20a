"""Sees when a row writes the same again and again, so that it ends early and what is repeated can be left out."""

from collections.abc import Sequence

__all__ = ["find_loop"]

_FEWEST_REPEATED = 36
_FEWEST_TIMES = 3
_LONGEST_PERIOD = 48


def find_loop(tokens: Sequence[int], text_end: int) -> int | None:
    """Return where a loop at the end begins to repeat itself, or None.

    A loop is text that is written four times or more with 36 repeated tokens or more; timestamps between are passed
    over. Text that was written once is no part of what this finds: cutting there keeps the first time.

    Args:
        tokens: what the row wrote.
        text_end: ids below it are text.
    """
    places = [place for place, token in enumerate(tokens) if token < text_end]
    text = [tokens[place] for place in places]
    for period in range(1, min(_LONGEST_PERIOD, len(text) // (_FEWEST_TIMES + 1)) + 1):
        run = 0
        while run + period < len(text) and text[-1 - run] == text[-1 - run - period]:
            run += 1
        if run >= max(_FEWEST_REPEATED, _FEWEST_TIMES * period):
            return places[len(text) - run]
    return None
