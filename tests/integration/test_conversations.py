"""Conversations never compute again what was computed: real models, and mlx-lm's recurrent hybrid in an adapter."""

from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from attrs import frozen
from mlx_lm.models import qwen3_next

from headrace_kvcache import attend
from headrace_kvcache.recurrent_views import RecurrentView
from headrace_models import load
from headrace_sampling import SamplingParams
from headrace_scheduling import Engine, GenerateOptions, GenerationRequest
from headrace_scheduling.testing import FakeCodec
from headrace_scheduling.testing.loading import FakeFacts

NUM_TURNS = 20
QUESTIONS = ("What is a mill?", "And a river?", "Why does it turn?", "Name a stone.", "Go on.")


@frozen
class Turn:
    """Tokens of one turn: of its prompt, taken from the cache, and generated."""

    num_prompt: int
    num_cached: int
    reply: tuple[int, ...]

    @property
    def num_computed(self) -> int:
        return self.num_prompt - self.num_cached


def ask(engine: Engine, prompt: list[int], *, boundary: int | None = None, num_tokens: int = 6, **about: Any) -> Turn:
    """One turn, greedy, going on past EOS so that every reply has the same length."""
    options = GenerateOptions(max_tokens=num_tokens, ignore_eos=True, sampling=SamplingParams())
    request = GenerationRequest(prompt_ids=tuple(prompt), options=options, stable_boundary=boundary, **about)
    ((result,),) = engine.run([request])
    stats = result.finished.stats
    return Turn(stats.num_prompt_tokens, stats.num_cached_tokens, result.token_ids)


@pytest.mark.model
def test_twenty_turns_of_a_chat_compute_their_new_tokens(smollm2):
    """Law: from turn 2 on a chat computes its new tokens, the template's primer and the token that was not fed."""
    loaded: list[Any] = []

    def loader() -> Any:
        loaded.append(load(smollm2))
        return loaded[0]

    with Engine.open(loader) as engine:
        codec = loaded[0].codec
        messages: list[dict[str, str]] = [{"role": "system", "content": "Answer in a few words. " * 40}]
        before = 0
        for number in range(NUM_TURNS):
            messages.append({"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]})
            prepared = codec.prepare_chat(messages)
            turn = ask(engine, prepared.ids, boundary=prepared.stable_boundary)
            if number:
                primer = len(prepared.ids) - prepared.stable_boundary
                assert turn.num_computed <= turn.num_prompt - before + primer + 1, number
            before = turn.num_prompt + len(turn.reply)
            codec.remember([*prepared.ids, *turn.reply])
            messages.append({"role": "assistant", "content": codec.decode(turn.reply)})


def converse(engine: Engine, opening: list[int], vocab_size: int) -> None:
    """Twenty turns of raw prompts, each going on from the whole history."""
    history = list(opening)
    for number in range(NUM_TURNS):
        new = [(17 * number + 31 * index) % (vocab_size - 10) + 5 for index in range(6)]
        prompt = history + new
        turn = ask(engine, prompt, num_tokens=4)
        if number:
            assert turn.num_computed <= len(new) + 1, number
        history = prompt + list(turn.reply)


def branch(engine: Engine, opening: list[int]) -> None:
    """An edited last turn and an exact repeat begin at the copy that was made at the stable boundary."""
    first = ask(engine, [*opening, 7, 8, 9], boundary=len(opening))
    assert first.num_computed == len(opening) + 3 or first.num_cached > 0
    edited = ask(engine, [*opening, 11, 12, 13, 14], boundary=len(opening))
    assert edited.num_computed == 4
    repeated = ask(engine, [*opening, 7, 8, 9], boundary=len(opening) + 3)
    assert repeated.num_computed <= 3
    assert repeated.reply == first.reply


@pytest.mark.model
def test_twenty_turns_past_the_window_of_gemma(gemma3_270m):
    """Law: rings that have wrapped serve the next turn, an edited one, and a repeat."""
    with Engine.open(partial(load, gemma3_270m)) as engine:
        opening = [(37 * index) % 9_000 + 10 for index in range(520)]
        converse(engine, opening, 10_000)
        branch(engine, [(41 * index) % 9_000 + 10 for index in range(530)])


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 257,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 2000,
}


class AttendsLater:
    """A slot view for mlx-lm's layers, which ask for keys and values first and attend then."""

    def __init__(self, view: Any) -> None:
        self.view = view

    @property
    def offset(self) -> mx.array:
        return self.view.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None


def attend_now(
    queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any, **_: Any
) -> mx.array:
    assert mask is None, "only the slots know masks"
    return attend(cache.view, queries, keys, values, scale=scale)


class HybridModel:
    """mlx-lm's Qwen3-Next with random weights as a `RuntimeModel`: gated delta layers beside attention."""

    weights_bytes = 0
    config = FakeFacts(max_positions=2000)

    def __init__(self) -> None:
        mx.random.seed(11)
        self._model = qwen3_next.Model(qwen3_next.ModelArgs.from_dict({"model_type": "qwen3_next", **SIZES}))
        mx.eval(self._model.parameters())

    def make_cache(self) -> list[Any]:
        return self._model.make_cache()

    def forward_hidden(self, ids: mx.array, caches: Any, *, context: object | None = None) -> mx.array:
        kept = [cache if isinstance(cache, RecurrentView) else AttendsLater(cache) for cache in caches]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(qwen3_next, "scaled_dot_product_attention", attend_now)
            return self._model.model(ids, cache=kept)

    def logits_from_hidden(self, hidden: mx.array) -> mx.array:
        return self._model.lm_head(hidden)

    def row_context(self, **_: Any) -> None:
        return None

    def batch_context(self, rows: Any) -> None:
        return None


@frozen
class LoadedHybrid:
    model: HybridModel
    codec: FakeCodec
    identity: str = "hybrid"
    device: str = "cpu"
    representation: str = "float32"


def load_hybrid() -> LoadedHybrid:
    return LoadedHybrid(HybridModel(), FakeCodec())


def test_twenty_turns_of_a_recurrent_hybrid():
    """Law: recurrent states, which cannot go back, serve the next turn, an edited one and a repeat."""
    with Engine.open(load_hybrid) as engine:
        assert engine.info.max_rows == 8
        converse(engine, [(7 * index) % 200 + 5 for index in range(70)], 250)
        branch(engine, [(11 * index) % 200 + 5 for index in range(90)])


def test_hybrid_rows_in_a_batch_equal_themselves_alone():
    """Law: rows of a recurrent hybrid share steps, joins and slices without changing a token."""
    prompts = [[(n * 13 + 7 * index) % 200 + 5 for index in range(20 + 17 * n)] for n in range(6)]
    options = GenerateOptions(max_tokens=12, ignore_eos=True)
    with Engine.open(load_hybrid, prompt_cache_bytes=0, max_rows=4, prefill_chunk=32) as engine:
        alone = [engine.generate([prompt], options)[0].token_ids for prompt in prompts]
        together = [result.token_ids for result in engine.generate(prompts, options)]
    assert together == alone
