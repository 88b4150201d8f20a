"""What goes between scheduler, engine and runner: rows, the steps planned for them, and what the steps gave.

Plain data over ids and counts. What a row brings along that only the device understands (stored caches, a compiled
grammar) is carried and never looked into.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace_kvcache import PrefixNamespace
    from headrace_sampling import GrammarState, SamplingParams, TokenLogprobs
    from headrace_scheduling.events import FinishReason


class RowId(NamedTuple):
    """One choice of one request."""

    request_id: int
    choice: int = 0


@frozen(kw_only=True)
class CacheTraits:
    """What a model's slots can do, as far as decisions depend on it.

    Attributes:
        can_trim: every layer can always be cut back to any number of positions. If not, a row is copied exactly
            where it stands.
        first_chunk: from the prompt's length and its stable boundary, the positions after which a row is converted;
            None if rows are never converted.
    """

    can_trim: bool = True
    first_chunk: Callable[[int, int | None], int] | None = None


@frozen(kw_only=True)
class RowSpec:
    """What the scheduler knows of a row before it is admitted.

    Attributes:
        max_tokens: most tokens to sample; prompt and reply together fit the context.
        eos_token_ids: tokens that end the row; empty to ignore them.
        serial: the row runs only while no other does.
        is_batch: rows that are not are admitted first.
        namespace: what stored prefixes the row may begin with, and adds to; None for none.
        session_id: names the conversation to the prefix cache.
        stable_boundary: leading prompt tokens that the next turn has too.
        grammar: a compiled grammar of the row's own, at its beginning.
        prompt_logprobs: best candidates to capture for each prompt token after the first; None scores none.
    """

    row_id: RowId
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    serial: bool = False
    is_batch: bool = False
    namespace: PrefixNamespace | None = None
    session_id: str | None = None
    stable_boundary: int | None = None
    grammar: GrammarState | None = None
    prompt_logprobs: int | None = None


def _nothing_to_release() -> None:
    return


@frozen(kw_only=True)
class SharedPrefix:
    """Caches that hold a prompt's first tokens, ready to be copied into a slot.

    Attributes:
        caches: single-row caches, one per layer; several rows may copy them.
        first: tokens at the front that the caches leave out, because the store has them; no row can begin with these.
        is_converted: whether they are in the form that rows keep; rows of a quantizing scheme begin without.
        release: called once nobody will copy the caches any more.
    """

    num_tokens: int
    caches: Sequence[object]
    first: int = 0
    is_converted: bool = True
    release: Callable[[], None] = _nothing_to_release


@frozen(kw_only=True)
class RowOpening:
    """A row to seat, and what the runner needs for that.

    Attributes:
        prompt_ids: the whole prompt, for what looks back at it.
        eos_token_ids: the tokens that end the row.
        num_tokens: positions that its slot is made for.
        prefix: what the row begins with; the first slice goes on after it.
        grammar, prompt_logprobs: as in `RowSpec`.
    """

    row_id: RowId
    sampling: SamplingParams
    prompt_ids: tuple[int, ...]
    eos_token_ids: frozenset[int]
    num_tokens: int
    prefix: SharedPrefix | None = None
    grammar: GrammarState | None = None
    prompt_logprobs: int | None = None


@frozen(kw_only=True)
class PrefillSlice:
    """The next part of a row's prompt.

    Attributes:
        token_ids: the prompt tokens of this slice, at least one.
        is_last: the slice ends the prompt, so the step samples the row's first token.
        converts: the slice ends the row's first chunk, after which a quantizing scheme converts it.
    """

    row_id: RowId
    token_ids: tuple[int, ...]
    is_last: bool
    converts: bool = False


@frozen(kw_only=True)
class KnownRun:
    """Tokens of a reply that are fed together, because a grammar forces them.

    Attributes:
        token_ids: at least two: one that an earlier step sampled or is about to, and those that must follow it. They
            are fed, and the token after them is sampled.
    """

    row_id: RowId
    token_ids: tuple[int, ...]


@frozen(kw_only=True)
class Snapshot:
    """A copy to make of a row's first positions, before the step's forwards.

    Attributes:
        num_tokens: all that the row holds, or fewer if every cache of the model can be trimmed.
        first: positions at the front that need no copy, if every cache of the model can be trimmed.
        is_converted: whether the row is in the form that it keeps.
    """

    row_id: RowId
    num_tokens: int
    first: int = 0
    is_converted: bool = True


@frozen
class Step:
    """One step: first the copies, then the new rows are seated, then the forwards.

    Attributes:
        prefills: slices of prompts, oldest row first.
        decodes: rows that feed their last sampled token, which may be unread, and sample the next.
        runs: rows that feed several tokens instead.
    """

    prefills: tuple[PrefillSlice, ...] = ()
    decodes: tuple[RowId, ...] = ()
    openings: tuple[RowOpening, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    runs: tuple[KnownRun, ...] = ()

    @property
    def has_forwards(self) -> bool:
        """Whether anything is computed."""
        return bool(self.prefills or self.decodes or self.runs)

    def without(self, row_ids: frozenset[RowId]) -> Step:
        """Return the step without the forwards of some rows."""
        return Step(
            tuple(part for part in self.prefills if part.row_id not in row_ids),
            tuple(row_id for row_id in self.decodes if row_id not in row_ids),
            runs=tuple(run for run in self.runs if run.row_id not in row_ids),
        )


@frozen
class StepResult:
    """What one step sampled.

    Attributes:
        tokens: row -> what it gained: what was known of a run, then the sampled token, then what is known to come
            before the end of a complete row.
        logprobs: row -> one per token, for the rows that ask.
        complete: rows whose grammar lets nothing but the end follow.
        forced: row -> what its grammar forces next, of rows that are not complete.
        errors: rows that could not sample, and why; the others are not affected.
        prompt_logprobs: row -> one per prompt token after the first, with the row's first token, if it asks.
    """

    tokens: Mapping[RowId, tuple[int, ...]]
    logprobs: Mapping[RowId, tuple[TokenLogprobs, ...]] = field(factory=dict)
    complete: frozenset[RowId] = frozenset()
    forced: Mapping[RowId, tuple[int, ...]] = field(factory=dict)
    errors: Mapping[RowId, str] = field(factory=dict)
    prompt_logprobs: Mapping[RowId, tuple[TokenLogprobs, ...]] = field(factory=dict)


@frozen(kw_only=True)
class RowTokens:
    """What one row gained in a step.

    Attributes:
        token_ids: tokens to deliver; a final EOS is left out.
        num_sampled: tokens that count as generated, a final EOS included.
        logprobs: of the sampled tokens, a final EOS included; empty if the row does not ask.
        finish_reason: set when the row ended by EOS or by its limit.
        prompt_logprobs: with the row's first token, if it asks; see `StepResult`.
    """

    row_id: RowId
    token_ids: tuple[int, ...]
    num_sampled: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
