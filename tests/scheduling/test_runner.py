"""Laws of `MlxStepRunner`: a row in a batch equals the row alone on plain caches."""

import gc
import itertools
import weakref
from functools import partial

import mlx.core as mx
import pytest

from headrace_kvcache import KVCache, RotatingKVCache
from headrace_sampling import SamplingParams, make_step_sampler
from headrace_scheduling import Engine, EngineFailed, GenerateOptions, GenerationRequest, MlxStepRunner
from headrace_scheduling.cpu_streams import CpuStreams
from headrace_scheduling.scheduler import BatchScheduler
from headrace_scheduling.seats import make_seats
from headrace_scheduling.steps import RowId, RowSpec
from headrace_scheduling.testing import FailingModel, ModelLoaderFake, ScriptedModel
from headrace_scheduling.testing.loading import FakeFacts

_FACTS = FakeFacts(max_positions=600, eos_token_ids=frozenset())
_PROMPTS = [(5,), (7, 8, 9), tuple(range(40)), (1, 2), tuple(range(100, 117)), (200, 3, 4, 5)]
_SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=11)
_PENALISED = SamplingParams(repetition_penalty=1.4, repetition_window=0, min_tokens=4)


def _alone(model, prompt, num_tokens, params):
    """The obvious reference: one row, plain caches, the whole prompt at once, every token read."""
    caches = model.make_cache()
    sampler = make_step_sampler(params, vocab_size=model.config.vocab_size, initial_history=prompt)
    ids, tokens = mx.array([prompt]), []
    for step in range(num_tokens):
        hidden = model.forward_hidden(ids, caches)[:, -1:]
        token = sampler.sample(model.logits_from_hidden(hidden)[:, -1], step)
        tokens.append(token.tolist()[0])
        ids = mx.array([[tokens[-1]]])
    return tokens


def _runner(model, *, max_rows, **options):
    return MlxStepRunner(model, make_seats(model, None, max_rows=max_rows), **options)


def _dispatch(runner, scheduler, step):
    for snapshot in step.snapshots:
        tokens = scheduler.fed_tokens(snapshot.row_id)[: snapshot.num_tokens]
        scheduler.keep(snapshot.row_id, tokens, runner.copy(snapshot))
    for opening in step.openings:
        runner.seat(opening)
    runner.dispatch(step)


def _run(runner, scheduler):
    tokens = {}
    while True:
        step = scheduler.schedule()
        if step is not None:
            _dispatch(runner, scheduler, step)
        elif runner.num_in_flight == 0:
            return tokens
        if runner.num_in_flight == 2 or step is None:
            for gain in scheduler.apply(runner.collect()):
                tokens.setdefault(gain.row_id.request_id, []).extend(gain.token_ids)
                if gain.finish_reason is not None:
                    scheduler.remove(gain.row_id)
                    runner.release(gain.row_id)


def _spec(request_id, prompt, max_tokens, params):
    return RowSpec(row_id=RowId(request_id), prompt_ids=prompt, max_tokens=max_tokens, sampling=params)


@pytest.mark.parametrize("launches_early", [False, True])
@pytest.mark.parametrize("chunk", [7, 512])
def test_rows_in_a_batch_equal_the_rows_alone(launches_early, chunk):
    """Law: joins, leaves, slices, neighbours and pipelining change no token of a row, whatever its sampling."""
    model = ScriptedModel(_FACTS)
    runner = _runner(model, max_rows=3, launches_early=launches_early)
    scheduler = BatchScheduler(3, 600, prefill_chunk=chunk)
    kinds = (SamplingParams(), _SEEDED, _PENALISED)
    specs = [_spec(n, prompt, 6 + 5 * n, kinds[n % 3]) for n, prompt in enumerate(_PROMPTS)]
    for spec in specs:
        scheduler.submit([spec])
    tokens = _run(runner, scheduler)
    for spec in specs:
        assert tokens[spec.row_id.request_id] == _alone(model, spec.prompt_ids, spec.max_tokens, spec.sampling)
    assert runner.kv_bytes == 0


@pytest.mark.parametrize("chunk", [64, 512])
def test_streams_change_no_token(chunk):
    """Law: prompts that are dealt among streams give what they give alone, beside rows that decode."""
    model = ScriptedModel(_FACTS)
    shared = []
    runner = _runner(model, max_rows=3, streams=CpuStreams(2, shared.append))
    scheduler = BatchScheduler(3, 600, prefill_chunk=chunk)
    prompts = [tuple(range(start, start + length)) for start, length in ((1, 200), (50, 90), (7, 64), (3, 5), (9, 150))]
    specs = [_spec(n, prompt, 6, (SamplingParams(), _SEEDED)[n % 2]) for n, prompt in enumerate(prompts)]
    for spec in specs:
        scheduler.submit([spec])
    tokens = _run(runner, scheduler)
    for spec in specs:
        assert tokens[spec.row_id.request_id] == _alone(model, spec.prompt_ids, spec.max_tokens, spec.sampling)
    assert set(shared) == {1, 2}
    assert all(one != next_one for one, next_one in itertools.pairwise(shared))


def test_a_row_outgrows_its_buffers_unchanged():
    """Law: crossing a capacity border while a neighbour runs changes no token."""
    model = ScriptedModel(_FACTS)
    runner = _runner(model, max_rows=2)
    scheduler = BatchScheduler(2, 600)
    specs = [_spec(1, tuple(range(250)), 12, SamplingParams()), _spec(2, (4, 5), 14, SamplingParams())]
    for spec in specs:
        scheduler.submit([spec])
    tokens = _run(runner, scheduler)
    for spec in specs:
        assert tokens[spec.row_id.request_id] == _alone(model, spec.prompt_ids, spec.max_tokens, spec.sampling)


def test_the_head_sees_one_position_per_row():
    """Law: a prompt of any length costs one row of logits, not one per position."""
    shapes = []

    class Watched(ScriptedModel):
        def logits_from_hidden(self, hidden):
            shapes.append(hidden.shape[:2])
            return super().logits_from_hidden(hidden)

    scheduler = BatchScheduler(2, 600, prefill_chunk=16)
    scheduler.submit([_spec(1, tuple(range(40)), 3, SamplingParams())])
    _run(_runner(Watched(_FACTS), max_rows=2), scheduler)
    assert shapes == [(1, 1)] * 3


def test_released_rows_keep_their_neighbours_right():
    """Law: a slot that is freed with a step in flight and taken again does not disturb anyone."""
    model = ScriptedModel(_FACTS)
    runner = _runner(model, max_rows=2)
    scheduler = BatchScheduler(2, 600)
    scheduler.submit([_spec(1, (9, 8, 7), 50, SamplingParams())])
    scheduler.submit([_spec(2, (5, 6), 12, SamplingParams())])
    _dispatch(runner, scheduler, scheduler.schedule())
    _dispatch(runner, scheduler, scheduler.schedule())
    gains = {gain.row_id.request_id: list(gain.token_ids) for gain in scheduler.apply(runner.collect())}
    scheduler.remove(RowId(1))
    runner.release(RowId(1))
    scheduler.submit([_spec(3, (1, 2, 3, 4), 5, SamplingParams())])
    rest = _run(runner, scheduler)
    assert gains[2] + rest[2] == _alone(model, (5, 6), 12, SamplingParams())
    assert rest[3] == _alone(model, (1, 2, 3, 4), 5, SamplingParams())


def test_the_engine_generates_as_the_rows_alone_would():
    """Law: `Engine.generate` batches many prompts and returns each one's own tokens, in order."""
    loader = ModelLoaderFake(partial(ScriptedModel, _FACTS))
    with Engine.open(loader, max_rows=3, prefill_chunk=16) as engine:
        results = engine.generate(_PROMPTS, GenerateOptions(max_tokens=9, sampling=_SEEDED))
    model = ScriptedModel(_FACTS)
    for prompt, result in zip(_PROMPTS, results, strict=True):
        assert list(result.token_ids) == _alone(model, prompt, 9, _SEEDED)


def test_turns_of_a_conversation_go_on_from_what_is_stored():
    """Law: every turn gets the tokens of a row alone, though its beginning is stored turn by turn, never as a whole."""
    model, history, stored = ScriptedModel(_FACTS), tuple(range(1, 41)), 0
    options = GenerateOptions(max_tokens=9, ignore_eos=True, sampling=_SEEDED)
    with Engine.open(ModelLoaderFake(partial(ScriptedModel, _FACTS)), max_rows=2, prefill_chunk=64) as engine:
        for turn in range(6):
            history += tuple(range(turn + 1, turn + 8))
            ((result,),) = engine.run([GenerationRequest(prompt_ids=history, options=options)])
            assert list(result.token_ids) == _alone(model, history, 9, _SEEDED)
            assert result.finished.stats.num_cached_tokens == stored
            # The last token was sampled and not fed.
            history += result.token_ids
            stored = len(history) - 1


class Witness:
    """Lives as long as the frame of the failing forward, which also holds its caches."""


def test_a_failed_step_leaves_no_frame_alive(caplog):
    """Law: after a forward raised, nothing keeps its frames and with them the caches; the next request works."""
    refs = []

    def fail(caches):
        witness = Witness()
        refs.append(weakref.ref(witness))
        raise ArithmeticError("fails as told")

    loader = ModelLoaderFake(partial(FailingModel, _FACTS, failing_forwards=frozenset({3}), on_failure=fail))
    with Engine.open(loader) as engine:
        with pytest.raises(EngineFailed, match="ArithmeticError"):
            engine.generate([(1, 2, 3)], GenerateOptions(max_tokens=20))
        assert engine.generate([(1, 2, 3)], GenerateOptions(max_tokens=4))[0].finished.reason == "length"
        gc.collect()
        (ref,) = refs
        assert ref() is None
        assert engine.status.num_failed == 1
    assert "fails as told" in caplog.text


class _WindowedModel(ScriptedModel):
    """A model whose first layer sees its last positions alone."""

    def make_cache(self):
        return [RotatingKVCache(max_size=16), KVCache()]


def test_each_layer_gets_slots_of_its_cache_kind():
    """Law: a layer of windows gets rings, so rows past the window equal the rows alone on their own caches."""
    model = _WindowedModel(_FACTS)
    runner = _runner(model, max_rows=3)
    scheduler = BatchScheduler(3, 600, prefill_chunk=7)
    for number, prompt in enumerate(_PROMPTS):
        scheduler.submit([_spec(number, prompt, 24, SamplingParams())])
    found = _run(runner, scheduler)
    plain = ScriptedModel(_FACTS)
    for number, prompt in enumerate(_PROMPTS):
        assert found[number] == _alone(model, prompt, 24, SamplingParams())
    assert found[2] != _alone(plain, _PROMPTS[2], 24, SamplingParams())
