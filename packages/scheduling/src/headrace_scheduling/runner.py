"""Steps on the device: prefill into the row's own slot, decode from unread tokens, one read per step."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import define, field

from headrace_sampling import BatchSampler, RowSampling, create_row_sampling, make_step_sampler
from headrace_scheduling.packs import pack_slices
from headrace_scheduling.prompt_scores import PromptScores
from headrace_scheduling.row_grammar import RowGrammar, advance
from headrace_scheduling.seats import Seats, make_seats, measure_cache_spec
from headrace_scheduling.steps import SharedPrefix, Step, StepResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_kvcache import CacheSpec
    from headrace_sampling import TokenLogprobs
    from headrace_sampling.logprobs import StepLogprobs
    from headrace_scheduling.config import EngineConfig
    from headrace_scheduling.ports import LoadedModel, RowContext, RuntimeModel
    from headrace_scheduling.steps import CacheTraits, PrefillSlice, RowId, RowOpening, Snapshot

_CLEAR_EVERY_STEPS = 256


@define(eq=False)
class _Row:
    row_id: RowId
    slot: int
    sampling: RowSampling
    context: RowContext | None
    grammar: RowGrammar | None = None
    scores: PromptScores | None = None
    logprobs: list[TokenLogprobs] = field(factory=list)
    # Where the row's last sampled token is: an array of a step's tokens, and the row's index in it.
    tokens: mx.array | None = None
    index: int = 0

    def keep_logprobs(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Take what the sampling captured of an emitted token."""
        del token_id
        if logprobs is not None:
            self.logprobs.append(logprobs)


@define
class _Flight:
    """A step that was built.

    Attributes:
        rows, hidden: the rows that sample, and their last hidden positions `(B, 1, D)` in parts.
        prefilled: hidden positions that are only computed.
        tokens: `(B,) int32`, once the step is launched and if any row samples.
        logprobs: of the rows that ask.
    """

    rows: list[_Row]
    hidden: list[mx.array]
    prefilled: list[mx.array]
    tokens: mx.array | None = None
    logprobs: StepLogprobs | None = None
    is_launched: bool = False

    @property
    def has_grammar(self) -> bool:
        return any(row.grammar is not None for row in self.rows)


class MlxStepRunner:
    """A `StepRunner` over slots of the kinds of the model's caches. Everything happens on the thread that made it.

    A step samples its decode rows and the rows whose prompt ends, in one call and in this order.

    Args:
        model: runs the forwards.
        seats: the slots that rows live in.
        launches_early: whether to enqueue a step while the one before it is unread. That keeps a GPU busy. On the CPU
            enqueueing waits for most of the work, so there the step is only built, and enqueued after the read.
            None decides by the default device.
    """

    def __init__(self, model: RuntimeModel, seats: Seats, *, launches_early: bool | None = None) -> None:
        self._model = model
        self._seats = seats
        self._vocab_size = model.config.vocab_size
        self._launches_early = mx.default_device() == mx.Device(mx.gpu) if launches_early is None else launches_early
        self._sampler = BatchSampler()
        self._spec: CacheSpec | None = None
        self._num_steps = 0
        self._rows: dict[RowId, _Row] = {}
        self._flights: deque[_Flight] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def kv_bytes(self) -> int:
        return self._seats.batch.nbytes

    @property
    def traits(self) -> CacheTraits:
        return self._seats.traits

    @property
    def serial_reasons(self) -> tuple[str, ...]:
        return self._seats.serial_reasons

    def slot_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a slot for so many positions; the first call puts one token through the model."""
        if self._spec is None:
            self._spec = measure_cache_spec(self._model)
        return self._seats.scheme.bytes_at(self._spec, num_tokens)

    # ---- rows ------------------------------------------------------------------------------------------------

    def seat(self, opening: RowOpening) -> None:
        """Give a row a slot, with what it begins with."""
        grammar = None if opening.grammar is None else RowGrammar(opening.grammar, self._vocab_size)
        sampler = make_step_sampler(
            opening.sampling,
            vocab_size=self._vocab_size,
            choice=opening.row_id.choice,
            initial_history=opening.prompt_ids,
            eos_token_ids=opening.eos_token_ids,
            mask=grammar,
        )
        context = self._model.row_context()
        slot = self._seats.join(opening.num_tokens, opening.prefix)
        scores = None
        if opening.prompt_logprobs is not None:
            scores = PromptScores(opening.prompt_ids, opening.prompt_logprobs, self._vocab_size)
        row = _Row(opening.row_id, slot, create_row_sampling(sampler), context, grammar, scores)
        if sampler.captures_logprobs:
            row.sampling.on_token = row.keep_logprobs
        self._rows[opening.row_id] = row

    def release(self, row_id: RowId) -> None:
        """Free a row's slot."""
        row = self._rows.pop(row_id, None)
        if row is not None:
            self._seats.batch.leave(row.slot)

    def copy(self, snapshot: Snapshot) -> SharedPrefix:
        """Copy a row's first positions out of its slot."""
        self._launch_built()
        row = self._rows[snapshot.row_id]
        caches = self._seats.copy(row.slot, snapshot.num_tokens)
        return SharedPrefix(num_tokens=snapshot.num_tokens, caches=caches, is_converted=snapshot.is_converted)

    def reset(self) -> None:
        """Drop every row, buffer and step."""
        self._flights.clear()
        self._rows.clear()
        self._seats.reset()
        mx.clear_cache()

    # ---- steps -----------------------------------------------------------------------------------------------

    def dispatch(self, step: Step) -> None:
        """Build a step, and enqueue it as far as the device allows."""
        self._launch_built()
        flight = _Flight([], [], [])
        if step.decodes:
            # A view names its rows in ascending order of slot.
            flight.rows = sorted((self._rows[row_id] for row_id in step.decodes), key=_slot_of)
            flight.hidden.append(self._forward(self._last_tokens(flight.rows)[:, None], flight.rows))
        for pack in pack_slices(step.prefills):
            self._prefill(pack, flight)
        self._flights.append(flight)
        if len(self._flights) == 1:
            self._launch(flight)
        elif self._launches_early:
            self._launch_early(flight)
        self._clear_buffers(had_prefill=bool(step.prefills))

    def collect(self) -> StepResult:
        """Read the oldest step's tokens."""
        flight = self._flights.popleft()
        self._launch(flight)
        if flight.tokens is None:
            mx.eval(flight.prefilled)
            return StepResult({})
        values: list[int] = flight.tokens.tolist()  # pyright: ignore[reportAssignmentType]
        tokens = {row.row_id: (value,) for row, value in zip(flight.rows, values, strict=True)}
        return StepResult(
            tokens,
            {} if flight.logprobs is None else _emitted(flight.rows, values),
            complete=self._advance_grammars(flight, values) if flight.has_grammar else frozenset(),
            errors={row.row_id: row.grammar.error for row in flight.rows if row.grammar and row.grammar.error},
            prompt_logprobs=_scored(flight.rows),
        )

    def _advance_grammars(self, flight: _Flight, values: Sequence[int]) -> frozenset[RowId]:
        """Let grammars accept what was read, start their next masks, and return the rows that are complete."""
        bound = [(row, value) for row, value in zip(flight.rows, values, strict=True) if row.grammar is not None]
        grammars = [row.grammar for row, _ in bound if row.grammar is not None]
        advance(grammars, [value for _, value in bound])
        return frozenset(row.row_id for row, _ in bound if row.grammar is not None and row.grammar.only_ends)

    # ---- building --------------------------------------------------------------------------------------------

    def _prefill(self, parts: Sequence[PrefillSlice], flight: _Flight) -> None:
        """Append slices, padded on the right to the longest; the head never sees a whole prompt."""
        placed = sorted(((self._rows[part.row_id], part) for part in parts), key=_slot_of_placed)
        rows = [row for row, _ in placed]
        parts = [part for _, part in placed]
        lengths = [len(part.token_ids) for part in parts]
        longest = max(lengths)
        ids = mx.array([part.token_ids + (0,) * (longest - len(part.token_ids)) for part in parts], dtype=mx.int32)
        hidden = self._forward(ids, rows, lengths=lengths)
        ending = [index for index, part in enumerate(parts) if part.is_last]
        chosen = ending or range(len(parts))
        if len(parts) == 1:
            last = hidden[:, -1:]
        else:
            last = hidden[mx.array(list(chosen)), mx.array([lengths[index] - 1 for index in chosen])][:, None]
        if ending:
            flight.rows.extend(rows[index] for index in ending)
            flight.hidden.append(last)
        else:
            flight.prefilled.append(last)
        for index, (row, part) in enumerate(placed):
            if row.scores is not None:
                row.scores.take(hidden[index : index + 1, : lengths[index]], self._model.logits_from_hidden)
            if part.converts:
                self._seats.batch.convert(row.slot)

    def _forward(self, ids: mx.array, rows: Sequence[_Row], *, lengths: Sequence[int] | None = None) -> mx.array:
        num_tokens = ids.shape[1]
        slots = tuple(row.slot for row in rows)
        contexts = [row.context for row in rows]
        context = None if all(each is None for each in contexts) else self._model.batch_context(contexts)
        views = self._seats.batch.view(slots, num_tokens, lengths=lengths)
        hidden = self._model.forward_hidden(ids, views, context=context)
        self._seats.batch.advance(slots, num_tokens if lengths is None else lengths)
        return hidden

    def _last_tokens(self, rows: Sequence[_Row]) -> mx.array:
        """Return the rows' last sampled tokens `(B,)` without reading them."""
        source = rows[0].tokens
        if any(row.tokens is not source for row in rows):
            return mx.concatenate([_token_of(row) for row in rows])
        assert source is not None, "a row decodes only after its prompt"
        indices = [row.index for row in rows]
        if indices == list(range(source.shape[0])):
            return source
        return source[mx.array(indices)]

    # ---- the device ------------------------------------------------------------------------------------------

    def _launch_built(self) -> None:
        for flight in self._flights:
            self._launch(flight)

    def _launch(self, flight: _Flight) -> None:
        if not flight.is_launched:
            flight.is_launched = True
            self._sample(flight)
            # Not the buffers: these targets read them after the writes, and a further reference makes a write a copy.
            captured = () if flight.logprobs is None else flight.logprobs.arrays
            mx.async_eval(*([] if flight.tokens is None else [flight.tokens]), *captured, *flight.prefilled)

    def _launch_early(self, flight: _Flight) -> None:
        """Enqueue a step while the one before it is unread: all of it, or its forward if a grammar waits for tokens."""
        if flight.has_grammar:
            mx.async_eval(*flight.hidden, *flight.prefilled)
        else:
            self._launch(flight)

    def _sample(self, flight: _Flight) -> None:
        """Sample a step's rows. Only now: some filters read flags, which computes the step's forward."""
        if not flight.rows:
            return
        last = flight.hidden[0] if len(flight.hidden) == 1 else mx.concatenate(flight.hidden)
        logits = self._model.logits_from_hidden(last)[:, -1]
        sampled = self._sampler.sample(logits, [row.sampling for row in flight.rows])
        flight.tokens, flight.logprobs = sampled.tokens, sampled.logprobs
        flight.hidden.clear()
        for index, row in enumerate(flight.rows):
            row.tokens, row.index = flight.tokens, index

    def _clear_buffers(self, *, had_prefill: bool) -> None:
        self._num_steps += 1
        if had_prefill or self._num_steps % _CLEAR_EVERY_STEPS == 0:
            mx.clear_cache()


def _slot_of(row: _Row) -> int:
    return row.slot


def _slot_of_placed(placed: tuple[_Row, PrefillSlice]) -> int:
    return placed[0].slot


def _token_of(row: _Row) -> mx.array:
    assert row.tokens is not None, "a row decodes only after its prompt"
    return row.tokens[row.index : row.index + 1]


def _emitted(rows: Sequence[_Row], values: Sequence[int]) -> dict[RowId, tuple[TokenLogprobs, ...]]:
    """Emit the tokens of the rows that capture, and return what was captured."""
    found: dict[RowId, tuple[TokenLogprobs, ...]] = {}
    for row, value in zip(rows, values, strict=True):
        if row.sampling.sampler.captures_logprobs:
            row.sampling.emit(value)
            found[row.row_id] = tuple(row.logprobs)
            row.logprobs.clear()
    return found


def _scored(rows: Sequence[_Row]) -> dict[RowId, tuple[TokenLogprobs, ...]]:
    """Hand over the scores of the prompts that have ended: each once, with its row's first token."""
    found: dict[RowId, tuple[TokenLogprobs, ...]] = {}
    for row in rows:
        if row.scores is not None:
            found[row.row_id], row.scores = row.scores.entries(), None
    return found


def make_mlx_runner(loaded: LoadedModel, config: EngineConfig) -> MlxStepRunner:
    """Make the runner of a loaded model; the default of `EngineConfig.make_runner`."""
    return MlxStepRunner(loaded.model, make_seats(loaded.model, config.kv_scheme, max_rows=config.max_rows))
