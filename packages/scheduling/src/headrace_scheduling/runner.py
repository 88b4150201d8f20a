"""Steps on the device: prefill into the row's own slot, decode from unread tokens, one read per step."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import evolve

from headrace_sampling import BatchSampler, create_row_sampling, make_step_sampler
from headrace_scheduling import free_memory
from headrace_scheduling.cpu_streams import CpuStreams
from headrace_scheduling.flights import Flight, Row, emitted, last_tokens, scored
from headrace_scheduling.packs import pack_decodes, pack_slices
from headrace_scheduling.prompt_scores import PromptScores
from headrace_scheduling.row_grammar import RowGrammar, advance
from headrace_scheduling.seats import Seats, make_seats, measure_cache_spec
from headrace_scheduling.steps import SharedPrefix, Step, StepResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_kvcache import CacheSpec
    from headrace_scheduling.config import EngineConfig
    from headrace_scheduling.packs import Part
    from headrace_scheduling.ports import LoadedModel, RuntimeModel
    from headrace_scheduling.steps import CacheTraits, RowId, RowOpening, Snapshot

_GIVE_BACK_EVERY_STEPS = 256


class MlxStepRunner:
    """A `StepRunner` over slots of the kinds of the model's caches. Everything happens on the thread that made it.

    A step samples its decode rows and the rows whose prompt ends, in one call and in this order.

    Args:
        model: runs the forwards.
        seats: the slots that rows live in.
        launches_early: whether to enqueue a step while the one before it is unread. That keeps a GPU busy. On the CPU
            enqueueing waits for most of the work, so there the step is only built, and enqueued after the read.
            None decides by the default device.
        jumps_forward: whether tokens that a grammar forces are fed together.
        streams: what prompts are dealt among; None leaves them on the default stream.
    """

    def __init__(
        self,
        model: RuntimeModel,
        seats: Seats,
        *,
        launches_early: bool | None = None,
        jumps_forward: bool = True,
        streams: CpuStreams | None = None,
    ) -> None:
        self._model = model
        self._seats = seats
        self._vocab_size = model.config.vocab_size
        self._launches_early = mx.default_device() == mx.Device(mx.gpu) if launches_early is None else launches_early
        self._jumps_forward = jumps_forward
        self._streams = CpuStreams() if streams is None else streams
        self._sampler = BatchSampler()
        self._spec: CacheSpec | None = None
        self._num_steps = 0
        self._rows: dict[RowId, Row] = {}
        self._flights: deque[Flight] = deque()

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
        grammar = None
        if opening.grammar is not None:
            # A token that is not sampled has no log-probability.
            looks_ahead = self._jumps_forward and opening.sampling.logprobs is None
            grammar = RowGrammar(opening.grammar, self._vocab_size, looks_ahead=looks_ahead)
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
        row = Row(opening.row_id, slot, create_row_sampling(sampler), context, grammar, scores)
        if sampler.captures_logprobs:
            row.sampling.on_token = row.keep_logprobs
        self._rows[opening.row_id] = row

    def release(self, row_id: RowId) -> None:
        """Free a row's slot."""
        row = self._rows.pop(row_id, None)
        if row is not None:
            self._seats.batch.leave(row.slot)

    def copy(self, snapshot: Snapshot) -> SharedPrefix:
        """Copy a row's positions out of its slot."""
        self._launch_built()
        row = self._rows[snapshot.row_id]
        caches = self._seats.copy(row.slot, snapshot.num_tokens, first=snapshot.first)
        return SharedPrefix(
            num_tokens=snapshot.num_tokens, caches=caches, first=snapshot.first, is_converted=snapshot.is_converted
        )

    def reset(self) -> None:
        """Drop every row, buffer and step."""
        self._flights.clear()
        self._rows.clear()
        self._seats.reset()
        free_memory.give_back()

    # ---- steps -----------------------------------------------------------------------------------------------

    def dispatch(self, step: Step) -> None:
        """Build a step, and enqueue it as far as the device allows."""
        self._launch_built()
        runs = {run.row_id: run.token_ids[1:] for run in step.runs}
        flight = Flight([], [], [], runs, has_prompts=bool(step.prefills))
        decodes, slices = pack_decodes(step)
        if decodes:
            self._append(decodes, flight)
        for pack in self._streams.deal(pack_slices(slices)):
            self._append(pack, flight)
        self._flights.append(flight)
        if len(self._flights) == 1:
            self._take_known(flight)
            self._launch(flight)
        elif self._launches_early:
            self._launch_early(flight)
        self._give_back_memory(had_prefill=bool(step.prefills))

    def collect(self) -> StepResult:
        """Read the oldest step's tokens."""
        flight = self._flights.popleft()
        self._launch(flight)
        result = self._read(flight)
        if self._flights:
            self._take_known(self._flights[0])
        return result

    def _read(self, flight: Flight) -> StepResult:
        if flight.tokens is None:
            mx.eval(flight.prefilled)
            return StepResult({})
        values: list[int] = flight.tokens.tolist()  # pyright: ignore[reportAssignmentType]
        gained = {
            row.row_id: (*flight.runs.get(row.row_id, ()), value)
            for row, value in zip(flight.rows, values, strict=True)
        }
        result = StepResult(
            gained,
            {} if flight.logprobs is None else emitted(flight.rows, values),
            prompt_logprobs=scored(flight.rows),
        )
        return self._advance_grammars(flight, values, result) if flight.has_grammar else result

    def _advance_grammars(self, flight: Flight, values: Sequence[int], result: StepResult) -> StepResult:
        """Let grammars accept what was read, start their next masks, and add to the result what they say."""
        pairs = zip(flight.rows, values, strict=True)
        bound = [(row, row.grammar, value) for row, value in pairs if row.grammar is not None]
        advance([grammar for _, grammar, _ in bound], [value for _, _, value in bound])
        known = {row.row_id: grammar.known for row, grammar, _ in bound}
        complete = frozenset(row.row_id for row, grammar, _ in bound if grammar.ends_known)
        return evolve(
            result,
            tokens={
                row_id: (*tokens, *known[row_id]) if row_id in complete else tokens
                for row_id, tokens in result.tokens.items()
            },
            complete=complete,
            forced={row_id: tokens for row_id, tokens in known.items() if tokens and row_id not in complete},
            errors={row.row_id: grammar.error for row, grammar, _ in bound if grammar.error},
        )

    def _take_known(self, flight: Flight) -> None:
        """Let rows go on by the forced tokens of their runs, once all before them is read."""
        for row in flight.rows:
            token_ids = flight.runs.get(row.row_id)
            if token_ids and row.grammar is not None:
                row.sampling.fill(token_ids)
                for token_id in token_ids:
                    row.grammar.accept(token_id)

    # ---- building --------------------------------------------------------------------------------------------

    def _append(self, parts: Sequence[Part], flight: Flight) -> None:
        """Append parts of rows, padded on the right to the longest; the head never sees a whole prompt."""
        placed = sorted(((self._rows[part.row_id], part) for part in parts), key=_slot_of_placed)
        rows = [row for row, _ in placed]
        lengths = [part.length for _, part in placed]
        hidden = self._forward(self._ids(placed, max(lengths)), rows, lengths=lengths)
        sampling = [index for index, (_, part) in enumerate(placed) if part.samples]
        last = _last_positions(hidden, lengths, sampling or range(len(rows)))
        if sampling:
            flight.rows.extend(rows[index] for index in sampling)
            flight.hidden.append(last)
        else:
            flight.prefilled.append(last)
        for index, (row, part) in enumerate(placed):
            if row.scores is not None and part.is_prompt:
                row.scores.take(hidden[index : index + 1, : lengths[index]], self._model.logits_from_hidden)
            if part.converts:
                self._seats.batch.convert(row.slot)

    def _ids(self, placed: Sequence[tuple[Row, Part]], longest: int) -> mx.array:
        """Return the tokens to feed, `(B, longest) int32`: known ones, or rows' last sampled ones, without a read."""
        unread = [row for row, part in placed if not part.token_ids]
        if len(unread) == len(placed):
            return last_tokens(unread)[:, None]
        ids = mx.array([(*part.token_ids, *(0,) * (longest - len(part.token_ids))) for _, part in placed], mx.int32)
        if unread:
            places = mx.array([index for index, (_, part) in enumerate(placed) if not part.token_ids])
            ids[places, 0] = last_tokens(unread)
        return ids

    def _forward(self, ids: mx.array, rows: Sequence[Row], *, lengths: Sequence[int]) -> mx.array:
        num_tokens = ids.shape[1]
        slots = tuple(row.slot for row in rows)
        contexts = [row.context for row in rows]
        context = None if all(each is None for each in contexts) else self._model.batch_context(contexts)
        views = self._seats.batch.view(slots, num_tokens, lengths=None if num_tokens == 1 else lengths)
        hidden = self._model.forward_hidden(ids, views, context=context)
        self._seats.batch.advance(slots, 1 if num_tokens == 1 else lengths)
        return hidden

    # ---- the device ------------------------------------------------------------------------------------------

    def _launch_built(self) -> None:
        for flight in self._flights:
            self._launch(flight)

    def _launch(self, flight: Flight) -> None:
        if not flight.is_launched:
            flight.is_launched = True
            self._streams.prepare(has_prompts=flight.has_prompts)
            self._sample(flight)
            # Not the buffers: these targets read them after the writes, and a further reference makes a write a copy.
            captured = () if flight.logprobs is None else flight.logprobs.arrays
            mx.async_eval(*([] if flight.tokens is None else [flight.tokens]), *captured, *flight.prefilled)

    def _launch_early(self, flight: Flight) -> None:
        """Enqueue a step while the one before it is unread: all of it, or its forward if a grammar waits for tokens."""
        if flight.has_grammar:
            self._streams.prepare(has_prompts=flight.has_prompts)
            mx.async_eval(*flight.hidden, *flight.prefilled)
        else:
            self._launch(flight)

    def _sample(self, flight: Flight) -> None:
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

    def _give_back_memory(self, *, had_prefill: bool) -> None:
        self._num_steps += 1
        if had_prefill or self._num_steps % _GIVE_BACK_EVERY_STEPS == 0:
            free_memory.give_back()


def _slot_of_placed(placed: tuple[Row, Part]) -> int:
    # A view names its rows in ascending order of slot.
    return placed[0].slot


def _last_positions(hidden: mx.array, lengths: Sequence[int], chosen: Sequence[int]) -> mx.array:
    """Return the last real position of some rows, `(B, 1, D)`."""
    if len(lengths) == 1:
        return hidden[:, -1:]
    if hidden.shape[1] == 1 and len(chosen) == len(lengths):
        return hidden
    return hidden[mx.array(list(chosen)), mx.array([lengths[index] - 1 for index in chosen])][:, None]


def make_mlx_runner(loaded: LoadedModel, config: EngineConfig) -> MlxStepRunner:
    """Make the runner of a loaded model; the default of `EngineConfig.make_runner`."""
    seats = make_seats(loaded.model, config.kv_scheme, max_rows=config.max_rows)
    streams = CpuStreams(config.prefill_streams, config.share_blas)
    return MlxStepRunner(loaded.model, seats, jumps_forward=config.jump_forward, streams=streams)
