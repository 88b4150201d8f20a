"""The answer to a request that does not stream: every reply gathered, the best of them chosen."""

from collections.abc import Sequence
from typing import TypeVar

from attrs import define, field

from headrace_http_api.dialect import Dialect
from headrace_http_api.encoded import Choice, Reply
from headrace_http_api.generation_request import GenerationFields
from headrace_http_api.running import Running
from headrace_scheduling.events import Finished, TextDelta

__all__ = ["collect"]

RequestT = TypeVar("RequestT", bound=GenerationFields)


@define
class _Gathered:
    deltas: list[TextDelta] = field(factory=list[TextDelta])

    def reply(self, finished: Finished) -> Reply:
        return Reply(
            text="".join(delta.text for delta in self.deltas),
            token_ids=tuple(token_id for delta in self.deltas for token_id in delta.token_ids),
            logprobs=tuple(entry for delta in self.deltas for entry in delta.logprobs),
            finished=finished,
        )


async def collect(running: Running[RequestT], dialect: Dialect[RequestT]) -> dict[str, object]:
    """Wait for all replies and build the body.

    Choices are ordered by prompt, then as they were generated, or best first if more were generated than asked for.
    """
    request = running.request
    gathered = [[_Gathered() for _ in range(request.num_candidates)] for _ in running.prompts]
    async for place, delta in running.deltas():
        gathered[place][delta.choice].deltas.append(delta)
    choices: list[Choice] = []
    for place, candidates in enumerate(gathered):
        ends = running.prompts[place].generation.finished_choices
        replies = [one.reply(end) for one, end in zip(candidates, ends, strict=True)]
        for reply in _best(replies, request.n):
            await running.remember(place, reply.token_ids)
            choices.append(dialect.choice(running, place, len(choices), reply))
    return running.envelope.body(dialect.object_name, choices) | {"usage": running.usage()}


def _best(replies: Sequence[Reply], n: int) -> Sequence[Reply]:
    """Return the n replies whose tokens are the likeliest on average, best first; all as they are if there are n."""
    return replies if len(replies) == n else sorted(replies, key=_mean_logprob, reverse=True)[:n]


def _mean_logprob(reply: Reply) -> float:
    total = reply.finished.cumulative_logprob
    return (0.0 if total is None else total) / max(1, reply.finished.stats.num_generated_tokens)
