"""The samplers of all rows of a batch, run as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_sampling.chain import SampledStep, SamplingChain
from headrace_sampling.errors import BatchMismatch
from headrace_sampling.seeds import step_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from headrace_sampling.sampler import RowSampling


class BatchSampler:
    """Samples all rows of a step at once, each exactly as it would be sampled alone.

    The parameters are laid out once per membership: as long as the rows and their order stay the same, a step
    builds one small array of keys and the graph, nothing else. Not thread-safe.

    Args:
        may_read: whether a step may read from the device which rows with top-p alone need their vocabulary sorted.
            If not, sampling is always lazy and all of them are sorted. None allows it on the CPU.
    """

    def __init__(self, *, may_read: bool | None = None) -> None:
        self._may_read = may_read
        self._rows: tuple[RowSampling, ...] = ()
        self._vocab_size = -1
        self._chain: SamplingChain | None = None

    def sample(self, logits: mx.array, row_samplers: Sequence[RowSampling]) -> SampledStep:
        """Pick one token per row and advance every row's step.

        Args:
            logits: `(B, V)` floating point.
            row_samplers: one per row of the logits.

        Raises:
            BatchMismatch: there is not one sampler per row.
            InvalidSamplingParams: a logit bias outside the vocabulary.
        """
        rows = tuple(row_samplers)
        num_rows, vocab_size = logits.shape
        chain = self._chain
        if len(rows) != num_rows:
            raise BatchMismatch(num_rows, len(rows))
        # Tuples compare members by identity first, and RowSampling has no other equality.
        if chain is None or rows != self._rows or vocab_size != self._vocab_size:
            chain = SamplingChain([row.sampler.setup for row in rows], vocab_size, may_read=self._may_read)
            self._rows, self._vocab_size, self._chain = rows, vocab_size, chain
        steps = [row.step for row in rows]
        keys = [step_key(row.sampler.seed, step) for row, step in zip(rows, steps, strict=True)]
        sampled = chain.pick(logits, keys, steps)
        for place, row in enumerate(rows):
            row.advance(sampled.logprobs, place)
        return sampled
