"""From a window's tokens to segments, and to where the next window starts (openai/whisper, `transcribe.py`)."""

from collections.abc import Sequence

from attrs import frozen

from headrace_models.whisper.config import FRAMES_PER_POSITION

__all__ = ["Piece", "WindowCut", "cut_window"]

_SHORTEST_REST_FRAMES = 100


@frozen(kw_only=True)
class Piece:
    """A segment of a window; times are mel frames of 10 ms from the window's start."""

    start: int
    end: int
    tokens: tuple[int, ...]


@frozen(kw_only=True)
class WindowCut:
    """A window taken apart."""

    pieces: tuple[Piece, ...]
    advance: int
    """Mel frames to the next window's start, at least 1."""
    is_complete: bool
    """Whether the window ended with a timestamp after which nothing is said."""


def cut_window(
    tokens: Sequence[int], *, timestamp_begin: int, num_frames: int, ends_in_pause: bool = False
) -> WindowCut:
    """Cut a window where two timestamps meet.

    What follows the last such place is dropped, and the next window starts there; if there is none, all is one
    segment and the next window starts where this one ends.

    Args:
        num_frames: mel frames of audio in the window.
        ends_in_pause: whether the audio was cut where it is quiet: then what follows the last such place is a segment
            too, and only what is longer than a second is left for another window.
    """
    is_stamp = [token >= timestamp_begin for token in tokens]
    ends_once = is_stamp[-2:] == [False, True]
    times = [(token - timestamp_begin) * FRAMES_PER_POSITION for token in tokens]
    cuts = [place for place in range(1, len(tokens)) if is_stamp[place - 1] and is_stamp[place]]
    if not cuts:
        stamps = [time for time, stamp in zip(times, is_stamp, strict=True) if stamp]
        end = stamps[-1] if stamps and stamps[-1] > 0 else num_frames
        whole = Piece(start=0, end=end, tokens=tuple(tokens))
        return WindowCut(pieces=(whole,), advance=max(1, num_frames), is_complete=ends_once or ends_in_pause)
    if ends_once:
        cuts.append(len(tokens))
    pieces = [
        Piece(start=times[first], end=times[last - 1], tokens=tuple(tokens[first:last]))
        for first, last in zip([0, *cuts[:-1]], cuts, strict=True)
    ]
    reached = times[cuts[-1] - 1]
    if ends_in_pause and not ends_once:
        if cuts[-1] + 1 < len(tokens):
            pieces.append(
                Piece(start=times[cuts[-1]], end=max(num_frames, times[cuts[-1]]), tokens=tuple(tokens[cuts[-1] :]))
            )
            reached = num_frames
        if num_frames - reached <= _SHORTEST_REST_FRAMES:
            return WindowCut(pieces=tuple(pieces), advance=num_frames, is_complete=True)
    advance = num_frames if ends_once or reached <= 0 else min(reached, num_frames)
    return WindowCut(pieces=tuple(pieces), advance=max(1, advance), is_complete=ends_once)
