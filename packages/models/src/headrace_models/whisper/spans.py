"""Where audio may be cut for windows that decode side by side: at its quietest moments, so that no word is cut."""

from typing import TYPE_CHECKING

import numpy as np

from headrace_models.whisper.mel import HOP_SAMPLES

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["quiet_spans"]

# A window that is heard to its very end makes the model leave its last sentence out, to be heard again.
_LONGEST_SHARE = 11 / 12
_SEARCHED_SHARE = 1 / 4
_SMOOTHED_FRAMES = 41


def quiet_spans(samples: "NDArray[np.float32]", window_frames: int) -> list[tuple[int, int]]:
    """Cut audio into spans of at most 11/12 of a window, each but the last ending where its last quarter is quietest.

    Args:
        samples: `(N,)` at 16 kHz.
        window_frames: mel frames of a window.

    Returns:
        Half-open spans of mel frames, adjacent, from 0 to `N // 160`.
    """
    num_frames = len(samples) // HOP_SAMPLES
    frames = samples[: num_frames * HOP_SAMPLES].reshape(num_frames, HOP_SAMPLES)
    energy = np.einsum("ij,ij->i", frames, frames, dtype=np.float64)
    # Over four tenths of a second, so that a stop within a word is no pause.
    sums = np.cumsum(np.pad(energy, (_SMOOTHED_FRAMES // 2 + 1, _SMOOTHED_FRAMES // 2)))
    smooth = sums[_SMOOTHED_FRAMES:] - sums[:-_SMOOTHED_FRAMES] if num_frames else sums
    spans: list[tuple[int, int]] = []
    start, longest = 0, max(1, int(window_frames * _LONGEST_SHARE))
    while num_frames - start > longest:
        last = start + longest
        first = last - int(longest * _SEARCHED_SHARE)
        # Of equally quiet moments the last: fewer windows.
        end = last - int(np.argmin(smooth[first:last][::-1]))
        spans.append((start, end))
        start = end
    if num_frames > start:
        spans.append((start, num_frames))
    return spans
