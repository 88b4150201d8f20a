"""Dynamic time warping: the cheapest monotonic path through a matrix of costs."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["median_filter", "warp"]

_DIAGONAL, _DOWN, _RIGHT = 0, 1, 2


def warp(costs: "NDArray[np.float32]") -> tuple["NDArray[np.int64]", "NDArray[np.int64]"]:
    """Find the path from the first to the last cell that costs least, going down, right or both at once.

    Computed by anti-diagonals, which depend only on the two before them.

    Args:
        costs: `(N, M)`, N and M at least 1.

    Returns:
        Rows and columns of the path's cells, in order.
    """
    num_rows, num_columns = costs.shape
    total = np.full((num_rows + 1, num_columns + 1), np.inf, np.float32)
    total[0, 0] = 0
    steps = np.empty((num_rows + 1, num_columns + 1), np.int8)
    steps[0, :], steps[:, 0] = _RIGHT, _DOWN
    for diagonal in range(2, num_rows + num_columns + 1):
        rows = np.arange(max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1)
        columns = diagonal - rows
        both, down, right = total[rows - 1, columns - 1], total[rows - 1, columns], total[rows, columns - 1]
        is_both = (both < down) & (both < right)
        is_down = ~is_both & (down < both) & (down < right)
        steps[rows, columns] = np.where(is_both, _DIAGONAL, np.where(is_down, _DOWN, _RIGHT))
        total[rows, columns] = costs[rows - 1, columns - 1] + np.where(is_both, both, np.where(is_down, down, right))
    return _trace(steps)


def _trace(steps: "NDArray[np.int8]") -> tuple["NDArray[np.int64]", "NDArray[np.int64]"]:
    row, column = steps.shape[0] - 1, steps.shape[1] - 1
    path: list[tuple[int, int]] = []
    while row > 0 or column > 0:
        path.append((row - 1, column - 1))
        step = steps[row, column]
        row -= step != _RIGHT
        column -= step != _DOWN
    rows, columns = np.array(path[::-1]).T
    return rows, columns


def median_filter(x: "NDArray[np.float32]", width: int) -> "NDArray[np.float32]":
    """Take medians over `width` (odd) neighbours along the last axis, mirrored at its ends; short axes stay."""
    half = width // 2
    if x.shape[-1] <= half:
        return x
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(half, half)], mode="reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1), axis=-1).astype(x.dtype)
