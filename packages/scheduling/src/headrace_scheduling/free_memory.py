"""Memory that nothing uses any more, given back to the system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["give_back"]


def give_back() -> None:
    """Drop what MLX's buffer cache keeps, and on a CPU what malloc keeps between blocks that are in use.

    On a CPU MLX takes its buffers from malloc. What steps of a growing context free is of ever other sizes, and lies
    between blocks that stay: without this, glibc keeps it as long as they do.
    """
    mx.clear_cache()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Find glibc's function, which releases whole pages of every heap; None for other libraries and devices."""
    if mx.default_device() != mx.Device(mx.cpu):
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return None
