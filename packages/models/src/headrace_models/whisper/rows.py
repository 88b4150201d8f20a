"""One candidate of a window while it is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from headrace_models.whisper.guard import find_loop

if TYPE_CHECKING:
    from headrace_models.whisper.decoded import DecodeRequest
    from headrace_models.whisper.model import WhisperModel

__all__ = ["Row", "token_limit"]

_GUARD_EVERY = 8


@define(eq=False)
class Row:
    """What a candidate has written, and whether it has ended."""

    group: int
    request: DecodeRequest
    seed: int
    limit: int
    tokens: list[int] = field(factory=list[int])
    sum_logprob: float = 0.0
    loop_start: int | None = None
    is_done: bool = False

    def add(self, token: int, logprob: float, eot: int) -> None:
        """Take a token; the end is not kept, but its probability counts."""
        self.sum_logprob += logprob
        if token == eot:
            self.is_done = True
            return
        self.tokens.append(token)
        if self.request.guard and len(self.tokens) % _GUARD_EVERY == 0:
            self.loop_start = find_loop(self.tokens, eot)
        self.is_done = len(self.tokens) >= self.limit or self.loop_start is not None


def token_limit(model: WhisperModel, request: DecodeRequest) -> int:
    """Return how many tokens a row may write: half the context, what the request says, and what there is room for."""
    config = model.config
    wanted = config.text_context // 2 if request.max_tokens is None else request.max_tokens
    return max(1, min(wanted, config.text_context + 1 - len(request.initial)))
