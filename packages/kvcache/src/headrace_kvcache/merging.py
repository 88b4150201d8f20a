"""The name by which mlx-lm's `BatchGenerator` makes a batch of single-row caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Mergeable:
    """A single-row cache whose rows can share a batch. mlx-lm takes the absence of `merge` for a refusal."""

    __slots__ = ()

    @classmethod
    def merge(cls, caches: Sequence[object]) -> object:
        """Make a batch of one layer's caches, one per row, see `merge_caches`."""
        from headrace_kvcache import merge_caches

        return merge_caches(caches)
