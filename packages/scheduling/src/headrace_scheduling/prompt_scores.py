"""Log-probabilities of a prompt's own tokens, taken from its slices while they are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_sampling import score_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    import mlx.core as mx

    from headrace_sampling import TokenLogprobs

# Most logits that are projected at once: 32 MiB in float32, whatever the length of a slice.
_MAX_LOGITS = 2**23


class PromptScores:
    """Scores the tokens of one prompt after its first, each by the position before it.

    Args:
        prompt_ids: the whole prompt.
        num_top: best candidates per token.
        vocab_size: V of the logits.
    """

    def __init__(self, prompt_ids: tuple[int, ...], num_top: int, vocab_size: int) -> None:
        self._prompt_ids = prompt_ids
        self._num_top = num_top
        self._num_at_once = max(1, _MAX_LOGITS // vocab_size)
        self._num_seen = 0
        self._entries: list[TokenLogprobs] = []

    def take(self, hidden: mx.array, project: Callable[[mx.array], mx.array]) -> None:
        """Score the tokens that the next positions predict; waits for the device.

        Args:
            hidden: `(1, T, D)` of the next T positions of the prompt.
            project: from hidden states to logits `(1, T, V)`.
        """
        begin, end = self._num_seen, self._num_seen + hidden.shape[1]
        self._num_seen = end
        # The last position of the prompt predicts what is sampled.
        for at in range(begin, min(end, len(self._prompt_ids) - 1), self._num_at_once):
            targets = self._prompt_ids[at + 1 : min(at + self._num_at_once, end) + 1]
            part = hidden[:, at - begin : at - begin + len(targets)]
            self._entries += score_tokens(project(part)[0], targets, num_top=self._num_top)

    def entries(self) -> tuple[TokenLogprobs, ...]:
        """Return what was scored, one per token after the first."""
        return tuple(self._entries)
