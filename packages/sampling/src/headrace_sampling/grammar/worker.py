"""Masks computed beside the forward pass: one thread that hands all rows of a step to llguidance at once."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from llguidance import LLExecutor, LLMatcher
    from numpy.typing import NDArray


@define(eq=False)
class MaskWorker:
    """Computes masks of matchers, which nobody may touch until the result is there.

    Attributes:
        num_words: 32-bit words of the tokenizer's vocabulary.
    """

    num_words: int
    _pool: ThreadPoolExecutor | None = field(default=None, init=False)
    _executor: LLExecutor | None = field(default=None, init=False)

    def start(self, matchers: Sequence[LLMatcher]) -> Future[NDArray[np.uint32]]:
        """Start computing masks `(R, num_words)`, one row per matcher, and return at once."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "headrace-masks")
        return self._pool.submit(self.compute, matchers)

    def compute(self, matchers: Sequence[LLMatcher]) -> NDArray[np.uint32]:
        """Compute masks `(R, num_words)`, one row per matcher; other threads run meanwhile."""
        import numpy as np
        from llguidance import LLExecutor

        masks = np.zeros((len(matchers), self.num_words), np.uint32)
        num_bytes = self.num_words * masks.itemsize
        if len(matchers) == 1:
            matchers[0].unsafe_compute_mask_ptr(masks.ctypes.data, num_bytes)
            return masks
        if self._executor is None:
            self._executor = LLExecutor()
        places = [(matcher, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(places, masks.ctypes.data, num_bytes, len(matchers))
        return masks

    def close(self) -> None:
        """Let the thread end; idempotent. Masks that are asked for later start it anew."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
