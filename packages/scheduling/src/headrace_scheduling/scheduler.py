"""Which rows run in the next step: decisions over ids and counts only, no arrays and no text.

A row goes waiting -> prefill (slices of its prompt) -> decode -> finished. The scheduler may be asked for step n+1
before step n's tokens are known; results of rows that have ended since are dropped.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from attrs import define, field

from headrace_scheduling.prefill import deal_tokens
from headrace_scheduling.prefixes import Prefixes
from headrace_scheduling.running import RunningRow
from headrace_scheduling.sharing import MIN_SHARED, shared_length
from headrace_scheduling.steps import CacheTraits, KnownRun, RowOpening, SharedPrefix, Snapshot, Step
from headrace_scheduling.waiting import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace_scheduling.slot_budget import SlotBudget
    from headrace_scheduling.steps import PrefillSlice, RowId, RowSpec, RowTokens, StepResult
    from headrace_scheduling.waiting import WaitingRow

# A row stores its prompt while it still runs only if that many tokens were computed: the copy costs a step's time.
_WORTH_AN_EARLY_COPY = 512


@define
class BatchScheduler:
    """Admits rows by priority and plans steps. Not thread-safe: it belongs to the engine's thread.

    Attributes:
        max_rows: most rows that run at once.
        max_context: most positions of a row.
        prefill_chunk: most prompt tokens of one step, all rows together.
        traits: of the model's slots.
        budget: bytes of slots; None for no limit.
        prefixes: what rows may begin with and leave behind.
        waiting: rows without a slot.
        clock: seconds, monotonic.
        hold: while true nothing is admitted; running rows go on.
    """

    max_rows: int
    max_context: int
    prefill_chunk: int = field(default=512, kw_only=True)
    traits: CacheTraits = field(factory=CacheTraits, kw_only=True)
    budget: SlotBudget | None = field(default=None, kw_only=True)
    prefixes: Prefixes = field(factory=lambda: Prefixes(None), kw_only=True)
    waiting: WaitingQueue = field(factory=WaitingQueue, kw_only=True)
    clock: Callable[[], float] = field(default=time.monotonic, kw_only=True)
    hold: bool = field(default=False, init=False)
    _rows: dict[RowId, RunningRow] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        for name in ("max_rows", "max_context", "prefill_chunk"):
            value: int = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value!r}; it must be at least 1")

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def running_ids(self) -> tuple[RowId, ...]:
        """Rows that have a slot, in order of admission."""
        return tuple(self._rows)

    @property
    def waiting_ids(self) -> tuple[RowId, ...]:
        """Rows that wait, in the order of admission."""
        return tuple(row.spec.row_id for row in self.waiting.in_order(self.clock()))

    # ---- rows in and out -------------------------------------------------------------------------------------

    def submit(self, specs: Sequence[RowSpec]) -> None:
        """Queue the rows of one request: one per choice, with the same prompt.

        Raises:
            ValueError: an empty prompt, no room for a token, or more positions than the context.
            BudgetExceeded: a row can never fit the budget.
        """
        for spec in specs:
            self._check(spec)
        now, leader = self.clock(), specs[0]
        shares = len(specs) > 1 and len(leader.prompt_ids) > 1
        for spec in specs:
            is_led = shares and spec is not leader
            self.waiting.add(spec, now, leader=leader.row_id if is_led else None)

    def _check(self, spec: RowSpec) -> None:
        num_positions = len(spec.prompt_ids) + spec.max_tokens
        if not spec.prompt_ids or spec.max_tokens < 1 or num_positions > self.max_context:
            raise ValueError(
                f"a prompt of {len(spec.prompt_ids)} tokens with max_tokens={spec.max_tokens!r} does not fit; "
                f"both must be at least 1 and together at most {self.max_context}: place the request first"
            )
        if self.budget is not None:
            self.budget.refuse(num_positions)

    def remove(self, row_id: RowId) -> bool:
        """Forget a row wherever it is; whether it had a slot."""
        for waiting in self.waiting:
            if waiting.leader == row_id:
                # What it waited for will not come: it goes on alone.
                waiting.leader = None
        row = self._rows.pop(row_id, None)
        if row is None:
            self._drop(self.waiting.pop(row_id))
            return False
        if self.budget is not None:
            self.budget.release(row_id)
        return True

    def kept_tokens(self, row_id: RowId) -> tuple[int, ...]:
        """Return the tokens of a row that are worth storing as it leaves; empty if nothing is."""
        row = self._rows.get(row_id)
        if row is None or not row.is_converted or not self.prefixes.serves(row.spec) or row.spec.row_id.choice:
            return ()
        is_new = row.num_fed >= max(MIN_SHARED, row.num_cached + 1)
        return row.fed_tokens() if is_new else ()

    def num_stored(self, row_id: RowId, tokens: tuple[int, ...]) -> int:
        """Return how many first tokens of a row that leaves need no copy, because the store has them."""
        row = self._rows[row_id]
        # Rows that wait for a copy need a whole one.
        if not self.traits.can_trim or len(tokens) in row.followers:
            return 0
        return self.prefixes.held(row.spec, tokens)

    def fed_tokens(self, row_id: RowId) -> tuple[int, ...]:
        """Return the tokens of all positions that a running row's slot holds."""
        return self._rows[row_id].fed_tokens()

    def keep(self, row_id: RowId, tokens: tuple[int, ...], prefix: SharedPrefix) -> None:
        """Take a copy of a running row's first tokens: for the rows that wait for it, and for the store."""
        for waiting in self._dismiss(row_id, prefix.num_tokens):
            waiting.prefix = prefix
        self.prefixes.put(self._rows[row_id].spec, tokens, prefix)

    def dismiss_followers(self, row_id: RowId, num_tokens: int) -> None:
        """Let the rows that wait for a copy of a row's first tokens go on alone."""
        self._dismiss(row_id, num_tokens)

    def _dismiss(self, row_id: RowId, num_tokens: int) -> list[WaitingRow]:
        followers = self._rows[row_id].followers.pop(num_tokens, ())
        dismissed = [row for row in self.waiting if row.spec.row_id in followers]
        for row in dismissed:
            row.leader = None
        return dismissed

    # ---- planning --------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """Plan the next step, admitting what fits; None when no row can do anything before results are applied."""
        decodes, runs = self._continue()
        openings = self._admit()
        # After admission, which finds new followers, and before slices: a row that cannot be cut back is copied where
        # it stands. Rows that are seated in this very step hold nothing yet that could be copied.
        snapshots = self._due_snapshots(frozenset(opening.row_id for opening in openings))
        prefills = self._prefill(self.prefill_chunk - sum(len(run.token_ids) for run in runs))
        for row_id in decodes:
            self._rows[row_id].num_dispatched += 1
        for run in runs:
            self._rows[run.row_id].num_dispatched += len(run.token_ids)
        step = Step(prefills, tuple(decodes), openings, snapshots, tuple(runs))
        return step if step.has_forwards or snapshots else None

    def _continue(self) -> tuple[list[RowId], list[KnownRun]]:
        """Choose the rows that go on, by a token or by a run. Runs take the room of prompts, at most half of it."""
        decodes: list[RowId] = []
        runs: list[KnownRun] = []
        room = self.prefill_chunk // 2
        for row_id, row in self._rows.items():
            if not row.can_decode:
                continue
            run = row.next_run(room)
            if not self._may_grow(row, len(run) or 1):
                continue
            if run:
                runs.append(KnownRun(row_id=row_id, token_ids=run))
                room -= len(run)
            else:
                decodes.append(row_id)
        return decodes, runs

    def _may_grow(self, row: RunningRow, num_tokens: int) -> bool:
        return self.budget is None or self.budget.grow(row.spec.row_id, row.num_fed + num_tokens)

    def _due_snapshots(self, opened: frozenset[RowId]) -> tuple[Snapshot, ...]:
        due: list[Snapshot] = []
        for row_id, row in self._rows.items():
            if row_id in opened:
                continue
            lengths = {length for length in row.followers if self._is_due(row, length)}
            if row.snapshot_at and self._is_due(row, row.snapshot_at) and (row.reply or not row.waits_to_copy):
                lengths.add(row.snapshot_at)
                row.snapshot_at = 0
            due.extend(Snapshot(row_id=row_id, num_tokens=length, is_converted=row.is_converted) for length in lengths)
        return tuple(due)

    def _is_due(self, row: RunningRow, length: int) -> bool:
        return row.num_prefilled >= length if self.traits.can_trim else row.num_fed == length

    # ---- admission -------------------------------------------------------------------------------------------

    def _admit(self) -> tuple[RowOpening, ...]:
        openings: list[RowOpening] = []
        if self.hold or not len(self.waiting) or len(self._rows) >= self.max_rows:
            return ()
        for waiting in self.waiting.in_order(self.clock()):
            if len(self._rows) >= self.max_rows or not self._may_enter(waiting.spec):
                break
            if self._waits_for_leader(waiting):
                continue
            if not self._reserve(waiting.spec):
                break
            openings.append(self._open(waiting))
        return tuple(openings)

    def _may_enter(self, spec: RowSpec) -> bool:
        if not self._rows:
            return True
        return not spec.serial and not any(row.spec.serial for row in self._rows.values())

    def _reserve(self, spec: RowSpec) -> bool:
        return self.budget is None or self.budget.reserve(spec.row_id, len(spec.prompt_ids), spec.max_tokens)

    def _waits_for_leader(self, waiting: WaitingRow) -> bool:
        """Whether a row should wait for one that computes, or computed, more of its prompt than is stored."""
        if waiting.prefix is not None:
            return False
        if waiting.leader is not None:
            # It is there, or ahead in the queue: choice 0 of the same request.
            return True
        found = self._find_leader(waiting.spec)
        if found is None:
            return False
        row, length = found
        _follow(row, length, waiting)
        return True

    def _find_leader(self, spec: RowSpec) -> tuple[RunningRow, int] | None:
        if spec.namespace is None:
            return None
        best: tuple[RunningRow, int] | None = None
        least = self.prefixes.peek(spec) + MIN_SHARED
        for row in self._rows.values():
            if row.spec.namespace != spec.namespace:
                continue
            length = shared_length(spec.prompt_ids, row.spec.prompt_ids)
            if length >= least and self._can_still_copy(row, length):
                best, least = (row, length), length + 1
        return best

    def _can_still_copy(self, row: RunningRow, length: int) -> bool:
        # What a row began with is shared as it is given; a copy of it could only be made before the row goes on.
        return self.traits.can_trim or max(row.num_fed, row.num_cached + 1) <= length

    def _open(self, waiting: WaitingRow) -> RowOpening:
        spec = waiting.spec
        self.waiting.pop(spec.row_id)
        prefix = self._prefix_for(waiting)
        num_cached = 0 if prefix is None else prefix.num_tokens
        row = RunningRow(spec, num_cached=num_cached, num_prefilled=num_cached)
        self._plan_cuts(row, is_converted=prefix is not None and prefix.is_converted)
        self._rows[spec.row_id] = row
        for follower in self.waiting:
            if follower.leader != spec.row_id:
                continue
            if num_cached == len(spec.prompt_ids) - 1:
                # There is nothing to wait for: it begins with the same, from where this row had it.
                follower.leader, follower.prefix = None, waiting.prefix
            else:
                _follow(row, len(spec.prompt_ids) - 1, follower)
        return RowOpening(
            row_id=spec.row_id,
            sampling=spec.sampling,
            prompt_ids=spec.prompt_ids,
            eos_token_ids=spec.eos_token_ids,
            num_tokens=len(spec.prompt_ids) + 1,
            prefix=prefix,
            grammar=spec.grammar,
            prompt_logprobs=spec.prompt_logprobs,
        )

    def _prefix_for(self, waiting: WaitingRow) -> SharedPrefix | None:
        shared = waiting.prefix
        if shared is not None and shared.num_tokens >= self.prefixes.peek(waiting.spec):
            return shared
        return self.prefixes.take(waiting.spec)

    def _plan_cuts(self, row: RunningRow, *, is_converted: bool) -> None:
        """Decide where the row is converted and copied, once it is known what it begins with."""
        spec, num_prompt = row.spec, len(row.spec.prompt_ids)
        boundary = min(num_prompt if spec.stable_boundary is None else spec.stable_boundary, num_prompt - 1)
        if self.traits.first_chunk is not None and not is_converted:
            # What begins beyond its first chunk, unconverted, is converted after its first token.
            row.first_chunk = max(self.traits.first_chunk(num_prompt, boundary or None), row.num_cached + 1)
            row.is_converted = False
            row.cuts.add(row.first_chunk)
        if not self.prefixes.serves(spec) or spec.row_id.choice:
            return
        if self.traits.can_trim:
            if num_prompt - row.num_cached >= _WORTH_AN_EARLY_COPY:
                row.snapshot_at, row.waits_to_copy = num_prompt, True
        elif boundary >= max(MIN_SHARED, row.num_cached + 1):
            row.snapshot_at = boundary
            row.cuts.add(boundary)

    def _drop(self, waiting: WaitingRow | None) -> None:
        if waiting is not None and waiting.leader is not None and (leader := self._rows.get(waiting.leader)):
            for length, followers in list(leader.followers.items()):
                if waiting.spec.row_id in followers:
                    followers.remove(waiting.spec.row_id)
                if not followers:
                    del leader.followers[length]

    # ---- prefill ---------------------------------------------------------------------------------------------

    def _prefill(self, num_tokens: int) -> tuple[PrefillSlice, ...]:
        rows = [row for row in self._rows.values() if row.is_prefilling]
        shares = deal_tokens([row.num_next for row in rows], num_tokens)
        return tuple(row.next_slice(share) for row, share in zip(rows, shares, strict=True) if share)

    # ---- results ---------------------------------------------------------------------------------------------

    def apply(self, result: StepResult) -> list[RowTokens]:
        """Count a step's tokens; rows that reached EOS or their limit are marked, and removed by the caller."""
        gains: list[RowTokens] = []
        for row_id in result.tokens:
            row = self._rows.get(row_id) if row_id not in result.errors else None
            gain = None if row is None else row.gain(result)
            if gain is not None:
                gains.append(gain)
        return gains

    def check_integrity(self) -> None:
        """Check that no row occurs twice, that none is ahead of its limit, and the budget's books.

        Raises:
            RuntimeError: naming the law that is broken.
        """
        if len(self._rows) > self.max_rows:
            raise RuntimeError(f"{len(self._rows)} rows run; at most {self.max_rows} may")
        ids = [*self._rows, *(row.spec.row_id for row in self.waiting)]
        if len(ids) != len(set(ids)):
            raise RuntimeError(f"a row occurs twice in {ids!r}")
        for row in self._rows.values():
            if not len(row.reply) <= row.num_dispatched <= row.spec.max_tokens:
                raise RuntimeError(f"row {row.spec.row_id} was scheduled beyond its limit")
        if self.budget is not None:
            self.budget.check_integrity()
            if self.budget.holders != set(self._rows):
                raise RuntimeError(f"rows {self.budget.holders} hold bytes, and {set(self._rows)} run")


def _follow(row: RunningRow, length: int, waiting: WaitingRow) -> None:
    """Let a waiting row have a copy of a running row's first `length` tokens once they are there."""
    row.followers.setdefault(length, []).append(waiting.spec.row_id)
    row.cuts.add(length)
    waiting.leader = row.spec.row_id
