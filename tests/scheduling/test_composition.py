"""Everything composes: any two kinds of requests share a batch, and each row equals itself alone."""

import itertools
from functools import partial

import mlx.core as mx
import pytest

from headrace_kvcache import KVCache, KVScheme, RotatingKVCache
from headrace_sampling import GrammarCompiler, GrammarSpec, SamplingParams, TokenizerFacts
from headrace_scheduling import Engine, EngineConfig, GenerateOptions, GenerationRequest
from headrace_scheduling.testing import ModelLoaderFake, ScriptedModel
from headrace_scheduling.testing.loading import FakeFacts

_FACTS = FakeFacts(max_positions=600, eos_token_ids=frozenset({3}))
_PROMPTS = ((5, 6, 7, 8), tuple(range(40, 75)))

_FEATURES = {
    "greedy": GenerateOptions(max_tokens=10),
    "seeded": GenerateOptions(max_tokens=9, sampling=SamplingParams(temperature=0.9, seed=7)),
    "filters": GenerateOptions(
        max_tokens=9, sampling=SamplingParams(temperature=1.1, top_p=0.8, top_k=40, min_p=0.02, seed=8)
    ),
    "xtc": GenerateOptions(
        max_tokens=9, sampling=SamplingParams(temperature=1.0, xtc_probability=0.7, xtc_threshold=0.02, seed=5)
    ),
    "penalties": GenerateOptions(
        max_tokens=12,
        sampling=SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.3),
    ),
    "dry": GenerateOptions(max_tokens=12, sampling=SamplingParams(dry_multiplier=2.0)),
    "bias": GenerateOptions(max_tokens=8, sampling=SamplingParams(logit_bias={50: 9.0, 51: 9.5})),
    "logprobs": GenerateOptions(max_tokens=10, sampling=SamplingParams(logprobs=3)),
    "seeded logprobs": GenerateOptions(max_tokens=10, sampling=SamplingParams(temperature=0.8, seed=4, logprobs=0)),
    "choices": GenerateOptions(max_tokens=8, num_choices=3, sampling=SamplingParams(temperature=0.9, seed=21)),
    "stop": GenerateOptions(max_tokens=20, stop=("a", "\x05")),
    "ignore_eos": GenerateOptions(max_tokens=14, ignore_eos=True),
    "min_tokens": GenerateOptions(max_tokens=14, sampling=SamplingParams(min_tokens=6)),
    "grammar": GenerateOptions(max_tokens=12, sampling=SamplingParams(temperature=0.9, seed=2)),
    "forced runs": GenerateOptions(max_tokens=40, stop=("sa",), sampling=SamplingParams(repetition_penalty=1.2)),
}
_GRAMMARS = {
    "grammar": GrammarSpec.regex("[a-f]{3,20}"),
    "forced runs": GrammarSpec.regex("(what is|all that is) (to be )?said"),
}
_COMPILER = GrammarCompiler(
    TokenizerFacts(
        vocab_size=257,
        eos_token_ids=(3,),
        tokens=(*(bytes([n]) * (n != 3) for n in range(256)), b""),
    )
)
_KV = {
    "plain": None,
    "8 bits": KVScheme.uniform(8, 32),
    "per layer": KVScheme.per_layer([(1, 4, 32)]),
}


class _Model(ScriptedModel):
    """Heads of 32, so that they can be quantized."""

    _NUM_HEADS = 1
    _HEAD_SIZE = 32


class _Ringed(_Model):
    def make_cache(self):
        return [RotatingKVCache(max_size=16), KVCache()]


def _open(model, **options):
    config = EngineConfig(
        loader=ModelLoaderFake(partial(model, _FACTS)),
        max_rows=4,
        prefill_chunk=16,
        prompt_cache_bytes=0,
        compile_grammar=lambda loaded, spec: _COMPILER.compile(spec),
        **options,
    )
    return Engine.open_config(config)


def _request(name, prompt):
    return GenerationRequest(prompt_ids=prompt, options=_FEATURES[name], grammar=_GRAMMARS.get(name))


def _facts(results):
    return [(r.choice, r.token_ids, r.text, r.finished.reason, r.finished.stop_string) for r in results]


def _assert_same_logprobs(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_id == theirs.token_id
        assert abs(ours.logprob - theirs.logprob) < 1e-4
        assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in theirs.top]


@pytest.mark.parametrize(("model", "scheme"), [(_Model, "plain"), (_Ringed, "8 bits"), (_Ringed, "per layer")])
def test_each_pair_of_features_in_one_batch_equals_each_alone(model, scheme):
    """Law: tokens, text, reasons and log-probabilities of a row do not depend on what runs beside it."""
    with _open(model, kv_scheme=_KV[scheme]) as engine:
        alone = {
            (name, prompt): engine.run([_request(name, prompt)])[0]
            for name, prompt in itertools.product(_FEATURES, _PROMPTS)
        }
        assert any(r.logprobs for results in alone.values() for r in results)
        for first, second in itertools.combinations(_FEATURES, 2):
            pairs = [(first, _PROMPTS[0]), (second, _PROMPTS[1])]
            together = engine.run([_request(name, prompt) for name, prompt in pairs])
            for pair, results in zip(pairs, together, strict=True):
                assert _facts(results) == _facts(alone[pair]), (first, second)
                for result, expected in zip(results, alone[pair], strict=True):
                    _assert_same_logprobs(result.logprobs, expected.logprobs)


def test_logprobs_are_those_of_the_tokens():
    """Law: each delivered token has its own log-probability, and the end tells their sum, EOS included."""
    options = GenerateOptions(max_tokens=12, sampling=SamplingParams(logprobs=2, temperature=0.7, seed=1))
    with _open(_Model) as engine:
        for result in engine.generate(_PROMPTS, options):
            assert tuple(entry.token_id for entry in result.logprobs) == result.token_ids
            total = sum(entry.logprob for entry in result.logprobs)
            if result.finished.reason == "length":
                assert result.finished.cumulative_logprob == pytest.approx(total)
            else:
                assert result.finished.cumulative_logprob < total


def test_choices_draw_from_seeds_of_their_own():
    """Law: choice 0 is the request without choices, and the others are other draws of the same prompt."""
    sampling = SamplingParams(temperature=1.5, seed=99)
    with _open(_Model) as engine:
        (single,) = engine.generate([_PROMPTS[1]], GenerateOptions(max_tokens=10, sampling=sampling))
        options = GenerateOptions(max_tokens=10, sampling=sampling, num_choices=4)
        choices = engine.generate([_PROMPTS[1]], options)
        again = engine.generate([_PROMPTS[1]], options)
    assert choices[0].token_ids == single.token_ids
    assert len({choice.token_ids for choice in choices}) == 4
    assert _facts(choices) == _facts(again)


def test_a_scheme_without_slots_runs_each_row_alone():
    """Law: TurboQuant has no slots, so its rows run one at a time, and they do run."""

    class Wide(ScriptedModel):
        _NUM_HEADS = 1
        _HEAD_SIZE = 64

    with _open(Wide, kv_scheme=KVScheme.turbo()) as engine:
        assert engine.info.max_rows == 1
        assert engine.info.serial_reasons == ("kv-scheme-not-batchable",)
        results = engine.generate(_PROMPTS, GenerateOptions(max_tokens=6, num_choices=2))
        assert [len(result.token_ids) for result in results] == [6] * 4 or all(r.token_ids for r in results)


def test_a_quantized_engine_holds_quantized_bytes():
    """Law: the scheme reaches the slots: the buffers of an 8-bit engine are a fraction of a plain one's."""
    held = {}
    for name, scheme in (("plain", None), ("8 bits", KVScheme.uniform(8, 32))):
        with _open(_Model, kv_scheme=scheme) as engine:
            assert engine.info.kv_scheme == ("unquantized" if scheme is None else "uniform-b8-g32-s0")
            # The last look before the row leaves: until its first chunk is in, a row is stored as it comes.
            held[name] = [num_bytes for num_bytes in _watch_kv_bytes(engine) if num_bytes][-1]
    assert 0 < held["8 bits"] < 0.45 * held["plain"]


def _watch_kv_bytes(engine):
    seen = []
    original = engine._on_events

    def watch(events):
        seen.append(events.status.kv_bytes)
        original(events)

    engine._port._ledger._on_events = watch
    engine.generate([tuple(range(200))], GenerateOptions(max_tokens=5, ignore_eos=True))
    return seen


def test_the_budget_lowers_the_context_and_lets_rows_wait():
    """Law: with a budget for one row, rows run one after the other, and their tokens are the same."""
    with _open(_Model) as engine:
        expected = engine.generate(_PROMPTS, GenerateOptions(max_tokens=10))
    per_token = 2 * 2 * 32 * mx.float32.size
    with _open(_Model, kv_budget_bytes=1024 * per_token) as engine:
        assert engine.info.max_context == 600
        found = engine.generate(_PROMPTS, GenerateOptions(max_tokens=10))
        assert engine.status.kv_reserved_bytes == 0
    assert _facts(found) == _facts(expected)
