"""One running row as the scheduler counts it: what was dispatched, what was sampled, where slices must end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from headrace_scheduling.steps import PrefillSlice, RowTokens

if TYPE_CHECKING:
    from headrace_scheduling.events import FinishReason
    from headrace_scheduling.steps import RowId, RowSpec, StepResult


@define(eq=False)
class RunningRow:
    """A row with a slot.

    Attributes:
        num_cached: prompt tokens that it began with.
        num_prefilled: prompt tokens that it holds or that were dispatched.
        num_dispatched: tokens whose sampling was dispatched.
        reply: tokens sampled so far, a final EOS included.
        forced: tokens that must come next.
        first_chunk: prompt tokens after which it is converted; 0 if it never is, or is already.
        is_converted: whether it is in the form that it keeps.
        cuts: prompt positions at which a slice must end, because the row is copied or converted there.
        followers: rows that wait for a copy of the first so many tokens, by that number.
        snapshot_at: prompt positions to store early; 0 for none.
        waits_to_copy: whether the copy for the store waits for the first token.
    """

    spec: RowSpec
    num_cached: int = 0
    num_prefilled: int = 0
    num_dispatched: int = 0
    reply: list[int] = field(factory=list)
    forced: tuple[int, ...] = ()
    first_chunk: int = 0
    is_converted: bool = True
    cuts: set[int] = field(factory=set)
    followers: dict[int, list[RowId]] = field(factory=dict)
    snapshot_at: int = 0
    waits_to_copy: bool = False

    @property
    def is_prefilling(self) -> bool:
        """Whether part of the prompt was not dispatched yet."""
        return self.num_prefilled < len(self.spec.prompt_ids)

    @property
    def can_decode(self) -> bool:
        """Whether a further token may be dispatched."""
        return 0 < self.num_dispatched < self.spec.max_tokens

    @property
    def num_fed(self) -> int:
        """Positions that the row's slot holds, or will once what was dispatched has run."""
        return self.num_prefilled + max(0, self.num_dispatched - 1)

    @property
    def num_next(self) -> int:
        """Prompt tokens up to the next place where a slice must end."""
        end = len(self.spec.prompt_ids)
        cut = min((cut for cut in self.cuts if cut > self.num_prefilled), default=end)
        return cut - self.num_prefilled

    def fed_tokens(self) -> tuple[int, ...]:
        """Return the tokens of all positions that the slot holds. What was fed is known before it is fed again."""
        prompt = self.spec.prompt_ids[: self.num_prefilled]
        return prompt + (*self.reply, *self.forced)[: self.num_fed - len(prompt)]

    def next_run(self, num_tokens: int) -> tuple[int, ...]:
        """Return the tokens of the reply that are known and not fed yet, at most so many; empty if one goes as well."""
        if not self.forced:
            return ()
        begin = self.num_dispatched - 1
        # The token after them is sampled, so that much of the limit is left.
        end = begin + min(num_tokens, self.spec.max_tokens - self.num_dispatched)
        run = (*self.reply, *self.forced)[begin:end]
        return run if len(run) > 1 else ()

    def next_slice(self, num_tokens: int) -> PrefillSlice:
        """Count the next `num_tokens` of the prompt as dispatched and return their slice."""
        begin, end = self.num_prefilled, self.num_prefilled + num_tokens
        self.num_prefilled = end
        is_last = not self.is_prefilling
        self.num_dispatched = int(is_last)
        converts = not self.is_converted and end == self.first_chunk
        self.is_converted = self.is_converted or converts
        return PrefillSlice(
            row_id=self.spec.row_id,
            token_ids=self.spec.prompt_ids[begin:end],
            is_last=is_last,
            converts=converts,
        )

    def gain(self, result: StepResult) -> RowTokens | None:
        """Count what a step gave, cut at EOS and at the limit; None once the row has reached its end."""
        row_id, spec = self.spec.row_id, self.spec
        room = spec.max_tokens - len(self.reply)
        if room <= 0:
            return None
        taken = result.tokens[row_id][:room]
        reason: FinishReason | None = "length" if len(taken) == room else None
        delivered = taken
        for index, token_id in enumerate(taken):
            if token_id in spec.eos_token_ids:
                delivered, taken, reason = taken[:index], taken[: index + 1], "stop"
                break
        if reason != "stop" and row_id in result.complete and len(result.tokens[row_id]) <= room:
            reason = "stop"
        self.reply.extend(taken)
        self.forced = result.forced.get(row_id, ())
        logprobs = result.logprobs.get(row_id, ())[: len(taken)]
        return RowTokens(
            row_id=row_id,
            token_ids=delivered,
            num_sampled=len(taken),
            logprobs=logprobs,
            finish_reason=reason,
            prompt_logprobs=result.prompt_logprobs.get(row_id, ()),
        )
