"""Admitted generations of one request: their deltas as they come, and their counts."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from attrs import evolve, frozen

from headrace_http_api.encoded import EncodedPrompt, Envelope
from headrace_http_api.generation_request import GenerationFields
from headrace_http_api.ports import Generation, ServedModel
from headrace_scheduling.events import GenerateStats, TextDelta

__all__ = ["Running", "RunningPrompt"]

_logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=GenerationFields)


@frozen
class RunningPrompt:
    """One prompt and the generation of its replies."""

    prompt: EncodedPrompt
    generation: Generation


@frozen
class Running(Generic[RequestT]):
    """An admitted request and what its answer needs; one generation per prompt."""

    request: RequestT
    envelope: Envelope
    served: ServedModel
    prompts: Sequence[RunningPrompt]

    async def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield each delta with the index of its prompt."""
        if len(self.prompts) > 1:
            async with aclosing(_merged([running.generation for running in self.prompts])) as merged:
                async for place, delta in merged:
                    yield place, self._kept(delta)
        else:
            async for delta in self.prompts[0].generation:
                yield 0, self._kept(delta)

    def num_unread_tokens(self) -> int:
        """Count the tokens that wait because their client is slow."""
        return sum(running.generation.num_unread_tokens for running in self.prompts)

    def usage(self) -> dict[str, object]:
        """Build OpenAI's usage object; valid once all generations have ended.

        A prompt counts once, however many replies it got; every generated reply counts.
        """
        stats = [[end.stats for end in running.generation.finished_choices] for running in self.prompts]
        firsts = [choices[0] for choices in stats]
        num_prompt = sum(one.num_prompt_tokens for one in firsts)
        num_generated = 0 if self.request.drops_reply else sum(map(_num_generated, stats))
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(one.num_cached_tokens for one in firsts)},
        }

    async def remember(self, place: int, reply_ids: Sequence[int]) -> None:
        """Let the codec know what a reply was made of. Without it the next turn only computes more."""
        prompt = self.prompts[place].prompt
        if not prompt.is_chat:
            return
        try:
            await asyncio.to_thread(self.served.codec.remember, [*prompt.ids, *reply_ids])
        except Exception as error:  # noqa: BLE001 - a codec may raise anything, and the reply is whole
            _logger.warning("a reply's token ids could not be remembered: %s", type(error).__name__)

    def _kept(self, delta: TextDelta) -> TextDelta:
        return evolve(delta, text="", token_ids=(), logprobs=()) if self.request.drops_reply else delta


def _num_generated(choices: Sequence[GenerateStats]) -> int:
    return sum(one.num_generated_tokens for one in choices)


async def _merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Yield the deltas of several generations in the order in which they come."""
    iterators = [aiter(generation) for generation in generations]
    pending = {asyncio.ensure_future(anext(one, None)): place for place, one in enumerate(iterators)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = pending.pop(task)
                delta = task.result()
                if delta is not None:
                    pending[asyncio.ensure_future(anext(iterators[place], None))] = place
                    yield place, delta
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
