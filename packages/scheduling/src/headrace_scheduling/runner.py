"""Steps on the device: prefill into the row's own slot, decode from unread tokens, one read per step."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import define

from headrace_kvcache import make_row_batch
from headrace_sampling import BatchSampler, RowSampling, create_row_sampling, make_step_sampler
from headrace_scheduling.scheduler import PrefillSlice, RowOpening, Step, StepResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_scheduling.config import EngineConfig
    from headrace_scheduling.ports import LoadedModel, RowContext, RuntimeModel

_CLEAR_EVERY_STEPS = 256


@define
class _Row:
    sampling: RowSampling
    context: RowContext | None
    # Where the row's last sampled token is: an array of a step's tokens, and the row's index in it.
    tokens: mx.array | None = None
    index: int = 0


@define
class _Flight:
    """A step that was built.

    Attributes:
        request_ids, rows, hidden: the rows that sample, and their last hidden positions `(B, 1, D)` in parts.
        prefilled: hidden positions that are only computed.
        tokens: `(B,) int32`, once the step is launched and if any row samples.
    """

    request_ids: tuple[int, ...]
    rows: list[_Row]
    hidden: list[mx.array]
    prefilled: list[mx.array]
    tokens: mx.array | None = None
    is_launched: bool = False


class MlxStepRunner:
    """A `StepRunner` over slots of the kinds of the model's caches. Everything happens on the thread that made it.

    A step samples its decode rows and the rows whose prompt ends, in one call and in this order.

    Args:
        model: its `make_cache()` says which kind of slot each layer gets.
        max_rows: slots.
        launches_early: whether to enqueue a step while the one before it is unread. That keeps a GPU busy. On the CPU
            enqueueing waits for most of the work, so there the step is only built, and enqueued after the read.
            None decides by the default device.
    """

    def __init__(self, model: RuntimeModel, *, max_rows: int, launches_early: bool | None = None) -> None:
        self._model = model
        self._max_rows = max_rows
        self._vocab_size = model.config.vocab_size
        self._launches_early = mx.default_device() == mx.Device(mx.gpu) if launches_early is None else launches_early
        self._sampler = BatchSampler()
        self._num_steps = 0
        self._batch = make_row_batch(model.make_cache(), max_rows=max_rows)
        self._rows: dict[int, _Row] = {}
        self._flights: deque[_Flight] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def kv_bytes(self) -> int:
        return self._batch.nbytes

    def dispatch(self, step: Step) -> None:
        """Build a step, and enqueue it as far as the device allows."""
        self._launch_built()
        hidden: list[mx.array] = []
        prefilled: list[mx.array] = []
        if step.decodes:
            hidden.append(self._forward_decodes(tuple(row.slot for row in step.decodes)))
        # A view names its rows in ascending order of slot.
        parts = sorted(step.prefills, key=_slot_of)
        ending = [part for part in parts if part.is_last]
        if parts:
            last_hidden = self._forward_slices(parts)
            (hidden if ending else prefilled).append(last_hidden)
        sampled = (*step.decodes, *ending)
        rows = [self._rows[row.slot] for row in sampled]
        self._flights.append(_Flight(tuple(row.request_id for row in sampled), rows, hidden, prefilled))
        if self._launches_early or len(self._flights) == 1:
            self._launch(self._flights[-1])
        self._clear_buffers(had_prefill=bool(step.prefills))

    def collect(self) -> StepResult:
        """Read the oldest step's tokens."""
        flight = self._flights.popleft()
        self._launch(flight)
        if flight.tokens is None:
            mx.eval(flight.prefilled)
            return StepResult({})
        values: list[int] = flight.tokens.tolist()  # pyright: ignore[reportAssignmentType]
        return StepResult({request_id: (value,) for request_id, value in zip(flight.request_ids, values, strict=True)})

    def release(self, slot: int) -> None:
        """Free a slot."""
        del self._rows[slot]
        self._batch.leave(slot)

    def reset(self) -> None:
        """Drop every row, buffer and step."""
        self._flights.clear()
        self._rows.clear()
        self._batch = make_row_batch(self._model.make_cache(), max_rows=self._max_rows)
        mx.clear_cache()

    # ---- building --------------------------------------------------------------------------------------------

    def _forward_decodes(self, slots: tuple[int, ...]) -> mx.array:
        return self._forward(self._last_tokens(slots)[:, None], slots)

    def _forward_slices(self, parts: Sequence[PrefillSlice]) -> mx.array:
        """Append slices, padded on the right to the longest, and return the last hidden positions `(B, 1, D)`.

        B counts the rows whose prompt ends, or all if none does: the head never sees a whole prompt.
        """
        for part in parts:
            if part.opening is not None:
                self._join(part.slot, part.opening)
        lengths = [len(part.token_ids) for part in parts]
        longest = max(lengths)
        ids = mx.array([part.token_ids + (0,) * (longest - len(part.token_ids)) for part in parts], dtype=mx.int32)
        hidden = self._forward(ids, tuple(part.slot for part in parts), lengths=lengths)
        if len(parts) == 1:
            return hidden[:, -1:]
        rows = [row for row, part in enumerate(parts) if part.is_last] or list(range(len(parts)))
        return hidden[mx.array(rows), mx.array([lengths[row] - 1 for row in rows])][:, None]

    def _forward(self, ids: mx.array, slots: tuple[int, ...], *, lengths: Sequence[int] | None = None) -> mx.array:
        num_tokens = ids.shape[1]
        contexts = [self._rows[slot].context for slot in slots]
        context = None if all(each is None for each in contexts) else self._model.batch_context(contexts)
        views = self._batch.view(slots, num_tokens, lengths=lengths)
        hidden = self._model.forward_hidden(ids, views, context=context)
        self._batch.advance(slots, num_tokens if lengths is None else lengths)
        return hidden

    def _join(self, slot: int, opening: RowOpening) -> None:
        if self._batch.join() != slot:
            raise RuntimeError(f"slot {slot} is not the lowest free one; scheduler and cache disagree")
        sampler = make_step_sampler(
            opening.sampling,
            vocab_size=self._vocab_size,
            initial_history=opening.prompt_ids,
            eos_token_ids=opening.eos_token_ids,
        )
        self._rows[slot] = _Row(create_row_sampling(sampler), self._model.row_context())

    def _last_tokens(self, slots: Sequence[int]) -> mx.array:
        """Return the rows' last sampled tokens `(B,)` without reading them."""
        rows = [self._rows[slot] for slot in slots]
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
            mx.async_eval(*([] if flight.tokens is None else [flight.tokens]), *flight.prefilled)

    def _sample(self, flight: _Flight) -> None:
        """Sample a step's rows. Only now: some filters read flags, which computes the step's forward."""
        if not flight.rows:
            return
        last = flight.hidden[0] if len(flight.hidden) == 1 else mx.concatenate(flight.hidden)
        logits = self._model.logits_from_hidden(last)[:, -1]
        flight.tokens = self._sampler.sample(logits, [row.sampling for row in flight.rows]).tokens
        flight.hidden.clear()
        for index, row in enumerate(flight.rows):
            row.tokens, row.index = flight.tokens, index

    def _clear_buffers(self, *, had_prefill: bool) -> None:
        self._num_steps += 1
        if had_prefill or self._num_steps % _CLEAR_EVERY_STEPS == 0:
            mx.clear_cache()


def _slot_of(part: PrefillSlice) -> int:
    return part.slot


def _token_of(row: _Row) -> mx.array:
    assert row.tokens is not None, "a row decodes only after its prompt"
    return row.tokens[row.index : row.index + 1]


def make_mlx_runner(loaded: LoadedModel, config: EngineConfig) -> MlxStepRunner:
    """Make the runner of a loaded model; the default of `EngineConfig.make_runner`."""
    return MlxStepRunner(loaded.model, max_rows=config.max_rows)
