"""Headrace's batches in mlx-lm's hands: its `BatchGenerator` runs its own models on them and cannot tell."""

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import gemma3_text, llama, qwen3_next

from headrace_kvcache import (
    CacheList,
    KVCache,
    QuantizedKVCache,
    RecurrentCache,
    RotatingKVCache,
    RotatingQuantizedKVCache,
    merge_caches,
)

VOCABULARY = 101
WINDOW = 8
KINDS = (KVCache, QuantizedKVCache, RotatingKVCache, RotatingQuantizedKVCache, RecurrentCache, CacheList)


def make_llama():
    return llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            rms_norm_eps=1e-5,
            vocab_size=VOCABULARY,
            tie_word_embeddings=False,
        )
    )


def make_gemma():
    return gemma3_text.Model(
        gemma3_text.ModelArgs(
            model_type="gemma3_text",
            hidden_size=32,
            num_hidden_layers=6,
            intermediate_size=64,
            num_attention_heads=4,
            head_dim=32,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            sliding_window=WINDOW,
            sliding_window_pattern=3,
            query_pre_attn_scalar=16,
        )
    )


def make_hybrid():
    return qwen3_next.Model(
        qwen3_next.ModelArgs(
            model_type="qwen3_next",
            hidden_size=32,
            num_hidden_layers=4,
            intermediate_size=64,
            num_attention_heads=4,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            linear_conv_kernel_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            shared_expert_intermediate_size=32,
            mlp_only_layers=[0, 1, 2, 3],
            moe_intermediate_size=32,
            rms_norm_eps=1e-5,
            vocab_size=VOCABULARY,
            num_key_value_heads=2,
            rope_theta=10000.0,
            partial_rotary_factor=0.5,
            max_position_embeddings=1000,
            full_attention_interval=2,
            head_dim=32,
        )
    )


MODELS = {"llama": make_llama, "gemma3": make_gemma, "gated delta": make_hybrid}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    mx.random.seed(7)
    model = MODELS[request.param]()
    mx.eval(model.parameters())
    return model


@pytest.fixture
def mergeable(monkeypatch):
    """mlx-lm looks for `merge` on single caches."""
    for kind in KINDS:
        monkeypatch.setattr(kind, "merge", staticmethod(merge_caches), raising=False)


def headrace_cache(theirs):
    if isinstance(theirs, mlx_lm_cache.RotatingKVCache):
        return RotatingKVCache(theirs.max_size, theirs.keep)
    if isinstance(theirs, mlx_lm_cache.ArraysCache):
        return RecurrentCache(len(theirs.cache))
    return KVCache()


def headrace_caches(model):
    return [headrace_cache(theirs) for theirs in mlx_lm_cache.make_prompt_cache(model)]


def prompts(*lengths):
    mx.random.seed(sum(lengths))
    return [mx.random.randint(1, VOCABULARY, (length,)).tolist() for length in lengths]


def generate(model, make_caches, *, first, later, max_tokens, step_size=16, removed=()):
    """Run a schedule: some prompts, more of them after five steps, some removed after eight."""
    generator = BatchGenerator(
        model, max_tokens=64, stop_tokens=set(), prefill_step_size=step_size, prefill_batch_size=3
    )
    uids = generator.insert(first, max_tokens[: len(first)], caches=[make_caches() for _ in first])
    results = {uid: [] for uid in uids}
    for turn in range(60):
        if turn == 5 and later:
            more = generator.insert(later, max_tokens[len(first) :], caches=[make_caches() for _ in later])
            uids += more
            results.update({uid: [] for uid in more})
        if turn == 8:
            generator.remove([uids[index] for index in removed])
        _, responses = generator.next()
        for response in responses:
            results[response.uid].append((response.token, mx.array(response.logprobs), response.prompt_cache))
    generator.close()
    return [results[uid] for uid in uids]


def assert_same(ours, theirs, tolerance=1e-4):
    """Log-probabilities within the tolerance; tokens equal up to a row's first near-tie."""
    compared = 0
    for our_row, their_row in zip(ours, theirs, strict=True):
        assert len(our_row) == len(their_row)
        for (token, logprobs, _), (their_token, their_logprobs, _) in zip(our_row, their_row, strict=True):
            assert mx.abs(logprobs - their_logprobs).max().item() <= tolerance
            compared += 1
            if token != their_token:
                best = mx.sort(their_logprobs)[-2:]
                assert (best[1] - best[0]).item() <= 2 * tolerance
                break
    return compared


def test_batch_generation_equals_mlx_lms_own_caches(model, mergeable):
    """Ragged prompts, padded chunks, rows that end, join later and are removed: the same log-probabilities."""
    schedule = {
        "first": prompts(5, 37, 20, 3),
        "later": prompts(11, 2, 50),
        "max_tokens": [4, 20, 9, 30, 12, 25, 6],
        "removed": (3,),
    }
    theirs = generate(model, lambda: mlx_lm_cache.make_prompt_cache(model), **schedule)
    ours = generate(model, lambda: headrace_caches(model), **schedule)
    assert assert_same(ours, theirs) > 60
    for row, maximum in zip(ours, schedule["max_tokens"], strict=True):
        assert len(row) in (maximum, 3, 4, 5, 6, 7, 8)


def test_an_extracted_row_goes_on_alone_and_in_a_batch(model, mergeable):
    """The cache that a finished row hands out serves a lone forward and another batch like mlx-lm's own."""
    outcomes = []
    for make_caches in (lambda: mlx_lm_cache.make_prompt_cache(model), lambda: headrace_caches(model)):
        rows = generate(model, make_caches, first=prompts(30, 6), later=[], max_tokens=[5, 12])
        caches = [row[-1][2] for row in rows]
        more = prompts(4)[0]
        again = BatchGenerator(model, max_tokens=6, stop_tokens=set())
        again.insert([more, more], caches=caches)
        tokens = []
        while responses := again.next()[1] or not tokens:
            tokens += [(r.uid, r.token) for r in responses] if isinstance(responses, list) else []
        again.close()
        lone = model(mx.array([more]), cache=[c.extract(0) if hasattr(c, "extract") else c for c in caches[0]])
        outcomes.append((tokens, lone))
    assert outcomes[0][0] == outcomes[1][0]
    assert mx.abs(outcomes[0][1] - outcomes[1][1]).max().item() <= 1e-4


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_rows_equal_the_row_alone(model, mergeable, bits):
    """Where mlx-lm cannot batch (quantized caches, quantized rings), a batched row equals the row generated alone.

    Within 1e-2: keys that differ in their last bits round to another level now and then.
    """

    def make_caches():
        return [quantized(cache, bits) for cache in headrace_caches(model)]

    wanted = prompts(5, 26, 14)
    lone = [
        generate(model, make_caches, first=[prompt], later=[], max_tokens=[15], step_size=8)[0] for prompt in wanted
    ]
    together = generate(model, make_caches, first=wanted, later=[], max_tokens=[15] * 3, step_size=8)
    assert assert_same(together, lone, tolerance=1e-2) > 20


def quantized(cache, bits):
    if isinstance(cache, RotatingKVCache):
        return RotatingQuantizedKVCache(cache.max_size, cache.keep, bits=bits, group_size=32)
    if isinstance(cache, KVCache):
        return QuantizedKVCache(bits=bits, group_size=32)
    return cache


def test_left_padded_prompts_equal_the_prompts_alone(mergeable):
    """A plain batch told `left_padding` gives each prompt's own logits, padding or not (float32, 1e-4)."""
    mx.random.seed(7)
    model = make_llama()
    wanted = prompts(4, 9, 7)
    alone = [model(mx.array([prompt]), cache=headrace_caches(model))[0, -1] for prompt in wanted]
    batch = [merge_caches([KVCache() for _ in wanted]) for _ in range(2)]
    padding = [9 - len(prompt) for prompt in wanted]
    for cache in batch:
        cache.prepare(left_padding=padding)
    padded = mx.array([[0] * pad + prompt for pad, prompt in zip(padding, wanted, strict=True)])
    model(padded[:, :4], cache=batch)
    logits = model(padded[:, 4:], cache=batch)
    assert batch[0].offset.tolist() == [4, 9, 7]
    for row, expected in enumerate(alone):
        assert mx.abs(logits[row, -1] - expected).max().item() <= 1e-4
