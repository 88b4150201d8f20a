"""Grammars in the batch: rows that have one stay inside it, and rows that have none do not notice."""

import json
import threading
from functools import partial

import pytest

from headrace_sampling import GrammarCompiler, GrammarSpec, SamplingParams, TokenizerFacts
from headrace_scheduling import (
    Cancel,
    Cancelled,
    EngineConfig,
    Finished,
    GenerateOptions,
    GenerationRequest,
    MlxStepRunner,
    Submit,
)
from headrace_scheduling.assembly import make_loop
from headrace_scheduling.seats import make_seats
from headrace_scheduling.testing import EngineRun, ModelLoaderFake, ScriptedModel, make_submit
from headrace_scheduling.testing.engine_run import ScriptedInbox
from headrace_scheduling.testing.loading import FakeFacts

_EOS = 256
_FACTS = FakeFacts(max_positions=400)
_COMPILER = GrammarCompiler(
    TokenizerFacts(
        vocab_size=257,
        eos_token_ids=(_EOS,),
        tokens=(*(bytes([n]) for n in range(256)), b""),
        special_token_ids=(_EOS,),
    )
)
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "on": {"type": "boolean"}},
    "required": ["name", "on"],
    "additionalProperties": False,
}
_JSON = GrammarSpec.json_schema(_SCHEMA, compact=True)
_SEEDED = SamplingParams(temperature=1.0, seed=5)


def _compile(loaded, spec):
    return _COMPILER.compile(spec)


def _run(requests, *, launches_early=False, max_rows=8, compile_grammar=_compile, later=(), inbox=None):
    """Run requests in one batch; returns the deltas' text and the end by row."""
    loaded = ModelLoaderFake(partial(ScriptedModel, _FACTS))()
    runner = MlxStepRunner(
        loaded.model, make_seats(loaded.model, None, max_rows=max_rows), launches_early=launches_early
    )
    config = EngineConfig(
        loader=lambda: loaded, max_rows=max_rows, prompt_cache_bytes=0, compile_grammar=compile_grammar
    )
    inbox, events = WaitingInbox() if inbox is None else inbox, []
    for number, request in enumerate(requests):
        limit = request.options.max_tokens
        inbox.put(Submit(request_id=number, request=request, max_tokens=limit))
    for message in later:
        inbox.put(message)
    make_loop(loaded, runner, config, inbox=inbox, publish=events.append).run()
    texts, ends = {}, {}
    for step in events:
        for row in step.rows:
            key = (row.request_id, row.choice)
            texts[key] = texts.get(key, "") + ("" if row.delta is None else row.delta.text)
            if row.end is not None:
                assert key not in ends, "a row ends once"
                ends[key] = row.end
    return texts, ends


class WaitingInbox(ScriptedInbox):
    """Where grammars are being compiled it waits for them; a second without news ends the run."""

    def take(self, *, block):
        if block and not self._messages:
            with self._condition:
                self._condition.wait(0.5)
        return super().take(block=block)


def _request(prompt, max_tokens=60, grammar=None, **options):
    return GenerationRequest(
        prompt_ids=tuple(prompt.encode()), options=GenerateOptions(max_tokens=max_tokens, **options), grammar=grammar
    )


@pytest.mark.parametrize("launches_early", [False, True])
@pytest.mark.parametrize("sampling", [SamplingParams(), _SEEDED])
def test_rows_with_and_without_a_grammar_share_a_batch(launches_early, sampling):
    """Law: every finished reply is valid, free rows are as without neighbours, whatever the device's pipelining."""
    free = [_request("free one", 20, sampling=sampling), _request("another", 25, sampling=sampling)]
    bound = [_request(f"give {n}", grammar=_JSON, sampling=sampling) for n in range(4)]
    alone, _ = _run(free, launches_early=launches_early)
    texts, ends = _run([free[0], *bound, free[1]], launches_early=launches_early)
    assert (texts[0, 0], texts[5, 0]) == (alone[0, 0], alone[1, 0])
    for number in range(1, 5):
        value = json.loads(texts[number, 0])
        assert set(value) == {"name", "on"}
        assert ends[number, 0].reason == "stop"


def test_a_bound_row_is_the_same_in_any_batch():
    """Law: a row's grammar follows its own tokens alone."""
    request = _request("give", grammar=_JSON, sampling=_SEEDED)
    alone, _ = _run([request])
    texts, _ = _run([_request("x", 30), request, _request("give it", grammar=_JSON, sampling=_SEEDED)])
    assert texts[1, 0] == alone[0, 0]


def test_a_complete_grammar_ends_the_row():
    """Law: when nothing may follow, the row ends without a step for EOS."""
    texts, ends = _run([_request("say", grammar=GrammarSpec.choice(["yes"]))])
    assert texts[0, 0] == "yes"
    assert ends[0, 0].reason == "stop"
    assert ends[0, 0].stats.num_generated_tokens == 3


def test_a_grammar_cut_by_the_limit_says_length():
    """Law: a reply that the limit cuts is not called complete."""
    texts, ends = _run([_request("say", 2, grammar=GrammarSpec.choice(["yes"]))])
    assert (texts[0, 0], ends[0, 0].reason) == ("ye", "length")


def test_choices_have_grammars_of_their_own():
    """Law: the choices of one request follow the grammar each by itself."""
    request = _request("give", grammar=_JSON, sampling=SamplingParams(temperature=1.3, seed=3), num_choices=4)
    texts, ends = _run([request])
    for choice in range(4):
        assert set(json.loads(texts[0, choice])) == {"name", "on"}
        assert isinstance(ends[0, choice], Finished)


def test_a_bad_grammar_fails_its_own_request():
    """Law: what cannot be compiled ends its request with the reason, and the others run."""
    _, ends = _run([_request("a", 5), _request("b", grammar=GrammarSpec.regex("a{2,1}"))])
    assert ends[1, 0].code == "request_failed"
    assert "regex" in ends[1, 0].message
    assert isinstance(ends[0, 0], Finished)


class DeadEnd:
    """A grammar that fails after two tokens."""

    def __init__(self):
        self._state = _COMPILER.compile(GrammarSpec.regex("[a-z]+"))
        self._count = 0

    def __getattr__(self, name):
        return getattr(self._state, name)

    def mask_words(self):
        from headrace_sampling import GrammarFailed

        if self._count == 2:
            raise GrammarFailed("no token may follow")
        return self._state.mask_words()

    @property
    def only_ends(self):
        return False

    def accept(self, token_id):
        self._count += 1
        self._state.accept(token_id)


@pytest.mark.parametrize("launches_early", [False, True])
def test_a_grammar_that_fails_ends_its_own_row(launches_early):
    """Law: a dead end inside a step fails its row with the reason; neighbours' tokens are as without it."""
    alone, _ = _run([_request("free one", 20)], launches_early=launches_early)
    texts, ends = _run(
        [_request("free one", 20), _request("b", grammar="dead")],
        compile_grammar=lambda loaded, spec: DeadEnd(),
        launches_early=launches_early,
    )
    assert texts[0, 0] == alone[0, 0]
    assert ends[1, 0].code == "request_failed"
    assert "no token may follow" in ends[1, 0].message


def test_rows_run_while_a_grammar_is_compiled():
    """Law: a slow compilation delays its own request only, and one that is cancelled meanwhile never runs."""
    gate = threading.Event()

    def slow(loaded, spec):
        gate.wait(20)
        return _COMPILER.compile(spec)

    class Opening(WaitingInbox):
        def take(self, *, block):
            # There is nothing to do but wait once the free row has ended: only then may the compiler go on.
            if block and not self._messages:
                gate.set()
            return super().take(block=block)

    requests = [_request("give", grammar=_JSON), _request("free", 8)]
    texts, ends = _run(requests, compile_grammar=slow, inbox=Opening())
    assert json.loads(texts[0, 0])
    assert list(ends) == [(1, 0), (0, 0)]
    _, ends = _run([_request("give", grammar=_JSON)], later=[Cancel(0)])
    assert ends[0, 0] == Cancelled()


def test_an_engine_without_a_compiler_refuses_grammars():
    """Law: a grammar is never dropped in silence."""
    run = EngineRun().run(make_submit(1, about={"grammar": _JSON}), make_submit(2))
    assert run.end(1).code == "request_failed"
    assert "grammar" in run.end(1).message
    assert run.text(2) == "abcab"


def test_logprobs_of_a_bound_row_are_after_its_mask():
    """Law: a closed token is never among the best, and the probabilities of a forced one are 1."""
    sampling = SamplingParams(logprobs=2)
    loaded = _run([_request("say", grammar=GrammarSpec.choice(["yes"]), sampling=sampling)])
    assert loaded[1][0, 0].cumulative_logprob == pytest.approx(0.0, abs=1e-5)
