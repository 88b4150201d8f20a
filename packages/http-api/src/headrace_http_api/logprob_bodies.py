"""Log-probabilities of replies in OpenAI's two shapes, whole and in pieces of a stream."""

from collections.abc import Callable, Iterable, Sequence

from attrs import define

from headrace_sampling import chat_logprobs, completion_logprobs
from headrace_sampling.token_logprobs import TokenLogprobs

__all__ = ["CompletionPen", "TokenBytes", "chat_body"]

TokenBytes = Callable[[int], bytes]


def chat_body(entries: Iterable[TokenLogprobs], token_bytes: TokenBytes) -> dict[str, object]:
    """Build the `logprobs` of a chat choice."""
    return {"content": chat_logprobs(entries, token_bytes), "refusal": None}


@define
class CompletionPen:
    """Writes the `logprobs` of one completion, piece by piece; offsets go on from piece to piece.

    Attributes:
        offset: code points of the tokens written so far.
    """

    token_bytes: TokenBytes
    offset: int = 0

    def write(self, entries: Sequence[TokenLogprobs | None], token_ids: Sequence[int]) -> dict[str, object]:
        """Build the body of the next tokens; None stands for a token that has no log-probability."""
        view = completion_logprobs(entries, token_ids, self.token_bytes, first_offset=self.offset)
        self.offset += sum(map(len, view["tokens"]))
        return {**view}
