"""Jump-forward: what a grammar forces is fed at once, and a reply is the one that it is without."""

from functools import partial

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvcache import KVCache, KVScheme, RecurrentCache, RotatingKVCache
from headrace_sampling import GrammarCompiler, GrammarSpec, SamplingParams, TokenizerFacts
from headrace_scheduling import Cancel, Engine, EngineConfig, Finished, GenerateOptions, GenerationRequest
from headrace_scheduling.runner import MlxStepRunner
from headrace_scheduling.scheduler import BatchScheduler
from headrace_scheduling.seats import make_seats
from headrace_scheduling.steps import KnownRun, PrefillSlice, RowId, RowOpening, RowSpec, Step, StepResult
from headrace_scheduling.testing import EngineRun, ModelLoaderFake, ScriptedModel, make_submit
from headrace_scheduling.testing.loading import FakeFacts

_EOS = 256
_FACTS = FakeFacts(max_positions=300)
_COMPILER = GrammarCompiler(
    TokenizerFacts(
        vocab_size=257,
        eos_token_ids=(_EOS,),
        tokens=(*(bytes([n]) for n in range(256)), b""),
        special_token_ids=(_EOS,),
    )
)
_CALL = GrammarSpec.regex(r'\{"name": "move", "to": "(north|northern|south)[a-c]{1,3}"\}( done)?')
_JSON = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {"title": {"enum": ["first of all", "last"]}, "is_right": {"type": "boolean"}},
        "required": ["title", "is_right"],
        "additionalProperties": False,
    }
)
_ONE = GrammarSpec.choice(["there is but one answer to this question, and it is a long one"])
_THINKING = GrammarSpec.choice(["the end", "then"], free_until="z")


class _Model(ScriptedModel):
    """Heads of 32, so that they can be quantized."""

    _NUM_HEADS = 1
    _HEAD_SIZE = 32


class _Ringed(_Model):
    def make_cache(self):
        return [RotatingKVCache(max_size=16), KVCache()]


class _Recurrent(_Model):
    """Its last layer sums up what it has seen."""

    def make_cache(self):
        return [KVCache(), KVCache(), RecurrentCache(1)]

    def forward_hidden(self, ids, caches, *, context=None):
        hidden = super().forward_hidden(ids, caches[:2], context=context)
        cache, num_tokens = caches[2], ids.shape[1]
        mask, state, states = cache.make_mask(num_tokens), cache[0], []
        for place in range(num_tokens):
            before = mx.zeros_like(hidden[:, 0]) if state is None else state
            state = 0.7 * before + hidden[:, place]
            if mask is not None:
                state = mx.where(mask[:, place, None], state, before)
            states.append(state)
        cache[0] = state
        cache.advance(num_tokens)
        return hidden + mx.stack(states, axis=1)


def _open(model=_Model, **options):
    fixed = {"max_rows": 4, "prefill_chunk": 32, "prompt_cache_bytes": 0} | options
    config = EngineConfig(
        loader=ModelLoaderFake(partial(model, _FACTS)),
        compile_grammar=lambda loaded, spec: _COMPILER.compile(spec),
        **fixed,
    )
    return Engine.open_config(config)


def _request(grammar, prompt=(5, 6, 7), max_tokens=90, **options):
    sampling = SamplingParams(**options.pop("sampling", {}))
    return GenerationRequest(
        prompt_ids=prompt, options=GenerateOptions(max_tokens=max_tokens, sampling=sampling, **options), grammar=grammar
    )


def _facts(results):
    ends = [result.finished for result in results]
    return [
        (r.choice, r.token_ids, r.text, end.reason, end.stop_string, end.stats.num_generated_tokens)
        for r, end in zip(results, ends, strict=True)
    ]


_WARM = {"temperature": 1.0, "seed": 3}
_MIX = (
    _request(_CALL),
    _request(_JSON, tuple(range(40, 75)), sampling=_WARM),
    _request(None, (9, 8), 30, sampling=_WARM),
    _request(_ONE),
    _request(_JSON, num_choices=3, sampling={**_WARM, "top_p": 0.9, "min_p": 0.01}),
    _request(_CALL, sampling={**_WARM, "repetition_penalty": 1.4, "frequency_penalty": 0.4, "dry_multiplier": 1.0}),
    _request(_CALL, sampling={"presence_penalty": 1.5, "presence_window": 6, "min_tokens": 40}),
    _request(_JSON, stop=("le", "is_r")),
    _request(_ONE, stop=("one ans",)),
    _request(_CALL, ignore_eos=True, sampling=_WARM),
    *(_request(_ONE, max_tokens=limit) for limit in (1, 2, 61, 62)),
    _request(_THINKING, max_tokens=40, sampling={**_WARM, "logit_bias": {ord("z"): 4.0}}),
    _request(_JSON, sampling={"logprobs": 2}),
)


@pytest.mark.parametrize(
    ("model", "options", "requests"),
    [
        (_Model, {}, _MIX),
        (_Ringed, {"kv_scheme": KVScheme.per_layer([(1, 8, 32)])}, _MIX),
        (_Recurrent, {"prefill_chunk": 16}, _MIX),
        (_Ringed, {"kv_scheme": KVScheme.uniform(8, 32, 2)}, (_MIX[0], _MIX[3], _MIX[5])),
    ],
    ids=["plain", "ring and 8 bits", "recurrent", "no slots"],
)
def test_replies_are_those_without_it_in_fewer_steps(model, options, requests):
    """Law: tokens, text, reason, stop string and counts of all rows of a batch are equal on caches of every kind."""
    found, steps = [], []
    for jumps in (False, True):
        with _open(model, jump_forward=jumps, **options) as engine:
            found.append([_facts(results) for results in engine.run(requests)])
            steps.append(engine.status.num_steps)
    for request, expected, results in zip(requests, *found, strict=True):
        assert results == expected, request
    assert steps[1] < 0.8 * steps[0]
    if requests is _MIX:
        assert found[1][3][0][2] == _ONE.choices[0]
        assert found[1][8][0][2] == "there is but "


def test_what_must_end_a_reply_costs_no_step():
    """Law: a reply that is known to its end ends with its first token; a long one is fed in a few runs."""
    known = GrammarSpec.choice(["nothing else can be said"])
    middle = GrammarSpec.regex(r"(ab|cd) then forced, and (x|y) to the end")
    for spec, bound in ((known, 2), (_ONE, 5), (middle, 8)):
        with _open(prefill_chunk=128) as engine:
            (results,) = engine.run([_request(spec)])
            assert results[0].finished.reason == "stop"
            assert engine.status.num_steps <= bound


def test_rows_that_want_logprobs_sample_every_token():
    """Law: with log-probabilities every token has its own, so nothing is jumped over."""
    steps = []
    for sampling in ({}, {"logprobs": 0}):
        with _open() as engine:
            (results,) = engine.run([_request(_CALL, sampling=sampling)])
            steps.append(engine.status.num_steps)
    assert len(results[0].logprobs) == len(results[0].token_ids) <= steps[1]
    assert steps[0] < steps[1] / 2


@pytest.mark.parametrize("model", [_Model, _Recurrent])
def test_the_next_turn_begins_with_what_a_run_fed(model):
    """Law: a stored reply of which a part was forced serves the next turn, which is as without a store."""
    follow = (9, 9)
    texts = []
    for num_bytes in (0, 2**20):
        with _open(model, prompt_cache_bytes=num_bytes) as engine:
            (first,) = engine.run([_request(_CALL, tuple(range(20)))])
            prompt = (*range(20), *first[0].token_ids, *follow)
            (second,) = engine.run([_request(None, prompt, 12)])
            texts.append((first[0].text, second[0].token_ids))
            if num_bytes and model is _Model:
                assert second[0].finished.stats.num_cached_tokens > 40
    assert texts[0] == texts[1]


def _is_forced(history, num_prompt):
    """Most of a reply's tokens, in runs of several lengths."""
    return (len(history) - num_prompt) % 11 not in (0, 4, 5)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_mix_of_runs_ends_as_without_them(data):
    """Law: under any arrivals, limits, stops, budgets and chunks, rows have the text and counts of plain rows."""
    script, cancelled = {}, set()
    for number in range(data.draw(st.integers(1, 6))):
        prompt = data.draw(st.text("abcd", min_size=1, max_size=12))
        stop = tuple(data.draw(st.lists(st.text("abcd", min_size=2, max_size=6), max_size=1)))
        step = data.draw(st.integers(0, 6))
        submit = make_submit(number, prompt, data.draw(st.integers(1, 30)), stop=stop)
        script.setdefault(step, []).append(submit)
        if data.draw(st.integers(0, 3)) == 0:
            cancelled.add(number)
            script.setdefault(step + data.draw(st.integers(0, 6)), []).append(Cancel(number))
    fixed = {
        "max_rows": data.draw(st.integers(1, 4)),
        "prefill_chunk": data.draw(st.integers(1, 30)),
        "kv_budget_bytes": data.draw(st.sampled_from([None, 1024, 2048])),
        "prompt_cache_bytes": data.draw(st.sampled_from([0, 1])),
        "can_trim": data.draw(st.booleans()),
    }
    runs = []
    for is_forced in (None, _is_forced):
        arrivals = {step: list(messages) for step, messages in script.items()}
        run = EngineRun(script=arrivals, is_forced=is_forced, **fixed)
        runs.append(run.run(*arrivals.pop(0, [])))
        run.loop._scheduler.check_integrity()
        assert run.runner.num_slots == 0
    seen = [{row.request_id for events in run.events for row in events.rows} for run in runs]
    for number in seen[0] & seen[1]:
        plain, jumping = (run.end(number) for run in runs)
        if number not in cancelled:
            assert isinstance(jumping, Finished)
            assert (jumping.reason, jumping.stop_string) == (plain.reason, plain.stop_string)
            assert jumping.stats.num_generated_tokens == plain.stats.num_generated_tokens
            assert runs[1].text(number) == runs[0].text(number)


@pytest.mark.parametrize("can_trim", [False, True])
def test_a_row_cancelled_in_a_run_stores_what_it_fed(can_trim, caplog):
    """Law: wherever a row is cancelled, what is stored of it has the tokens of all its positions."""
    for at in range(1, 9):
        script = {at: [Cancel(1)]}
        run = EngineRun(script=script, is_forced=_is_forced, can_trim=can_trim, prompt_cache_bytes=1)
        prompt = "the prompt of this row is long enough to be stored"
        run.run(make_submit(1, prompt, 60), later=[make_submit(2, prompt + prompt[:30] + "?", 5)])
        assert run.text(2) == (prompt + prompt[:30] + "?")[:5]
        if can_trim or at > 3:
            assert run.end(2).stats.num_cached_tokens > 0
    assert not caplog.records


def test_runs_take_half_of_the_room_of_prompts():
    """Law: runs feed at most half of a step's budget together, prompts get the rest, and what is left goes on later."""
    scheduler = BatchScheduler(4, 500, prefill_chunk=20)
    for number in range(3):
        spec = RowSpec(row_id=RowId(number), prompt_ids=(1, 2), max_tokens=50, sampling=SamplingParams())
        scheduler.submit([spec])
    step = scheduler.schedule()
    scheduler.submit([RowSpec(row_id=RowId(9), prompt_ids=(7,) * 60, max_tokens=5, sampling=SamplingParams())])
    forced = {RowId(number): (5,) * 8 for number in range(3)}
    scheduler.schedule()
    scheduler.apply(StepResult({part.row_id: (4,) for part in step.prefills}, forced=forced))
    step = scheduler.schedule()
    assert [len(run.token_ids) for run in step.runs] == [8, 2]
    assert [row.request_id for row in step.decodes] == [2]
    assert sum(len(part.token_ids) for part in step.prefills) == 10
    scheduler.check_integrity()


def test_a_run_goes_on_after_a_step_without_grammars():
    """Law: a row that left out a step takes what its run feeds, whoever else ran in that step."""
    model = _Model(_FACTS)
    runner = MlxStepRunner(model, make_seats(model, None, max_rows=2))
    answer = tuple(_ONE.choices[0].encode())
    for number, grammar in enumerate((_COMPILER.compile(_ONE), None)):
        runner.seat(
            RowOpening(
                row_id=RowId(number),
                sampling=SamplingParams(),
                prompt_ids=(5, 6),
                eos_token_ids=frozenset({_EOS}),
                num_tokens=100,
                grammar=grammar,
            )
        )
    prompts = tuple(PrefillSlice(row_id=RowId(number), token_ids=(5, 6), is_last=True) for number in range(2))
    runner.dispatch(Step(prefills=prompts))
    runner.dispatch(Step(decodes=(RowId(1),)))
    assert runner.collect().tokens[RowId(0)] == answer[:1]
    runner.dispatch(Step(decodes=(RowId(1),), runs=(KnownRun(row_id=RowId(0), token_ids=answer[:6]),)))
    runner.collect()
    assert runner.collect().tokens[RowId(0)] == answer[1:7]


class _Room:
    """A budget that notes how far rows want to grow, and lets one of them wait."""

    holders = frozenset()

    def __init__(self, waiting):
        self.grown = {}
        self._waiting = waiting

    def refuse(self, num_tokens):
        """Everything fits."""

    def reserve(self, row_id, num_prompt_tokens, max_tokens):
        return True

    def grow(self, row_id, num_tokens):
        self.grown[row_id] = num_tokens
        return row_id != self._waiting


def test_a_run_stays_within_the_rows_limit_and_slot():
    """Law: a run leaves room for the token that is sampled after it, and is fed only where its slot can hold it."""
    budget = _Room(RowId(1))
    scheduler = BatchScheduler(4, 500, prefill_chunk=100, budget=budget)
    for number, limit in enumerate((5, 50, 50)):
        spec = RowSpec(row_id=RowId(number), prompt_ids=(1, 2), max_tokens=limit, sampling=SamplingParams())
        scheduler.submit([spec])
    step = scheduler.schedule()
    tokens = {part.row_id: (4,) for part in step.prefills}
    scheduler.apply(StepResult(tokens, forced=dict.fromkeys(tokens, (5,) * 9)))
    runs = {run.row_id.request_id: len(run.token_ids) for run in scheduler.schedule().runs}
    assert runs == {0: 4, 2: 10}
    assert budget.grown == {RowId(0): 2 + 4, RowId(1): 2 + 10, RowId(2): 2 + 10}
    assert scheduler.schedule().decodes == (RowId(2),)
