"""mlx-lm's model classes on Headrace's caches: the same logits as on mlx-lm's own, through chunks, slabs and wraps.

Where mlx-lm refuses or is wrong (quantized rings), the oracle is an uncached forward whose keys and values pass the
same quantizer at the same positions.
"""

import ast
import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache as MlxLmRing
from mlx_lm.models.cache import make_prompt_cache as make_mlx_lm_cache

from headrace_kvcache import (
    CacheList,
    ChunkedKVCache,
    InvalidScheme,
    KVCache,
    KVScheme,
    LayerSpec,
    QuantizedKVCache,
    RecurrentCache,
    RotatingKVCache,
    RotatingQuantizedKVCache,
    UnsupportedCache,
    cache_spec_of,
    kv_bytes_at,
    make_prompt_cache,
)
from headrace_kvcache.converting import ConvertingCache
from headrace_kvcache.prompt_cache import _BOUND_TO_A_CLASS, _TWINS

VOCABULARY = 97
WINDOW = 24

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "head_dim": 32,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 1, "moe_intermediate_size": 32}
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "num_hidden_layers": 2},
    "gemma3_text": {**SIZES, "num_hidden_layers": 3, "sliding_window": WINDOW, "sliding_window_pattern": 3},
    "gpt_oss": {
        **SIZES,
        "num_hidden_layers": 2,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": WINDOW,
        "rope_theta": 1e4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": {"rope_type": "default"},
    },
    "qwen3_5": {**SIZES, **DELTA, "num_hidden_layers": 4, "full_attention_interval": 2},
    "qwen3_next": {
        **SIZES,
        **DELTA,
        **EXPERTS,
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "num_experts": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 1000,
    },
    "llama4": {
        "text_config": {
            **SIZES,
            "num_hidden_layers": 4,
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 64,
            "max_position_embeddings": 1000,
            "model_type": "llama4_text",
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "rope_theta": 1e4,
            "use_qk_norm": True,
        }
    },
    "gemma3n": {
        "text_config": {
            **SIZES,
            "model_type": "gemma3n",
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")],
            "vocab_size_per_layer_input": VOCABULARY,
            "sliding_window": WINDOW,
            "max_position_embeddings": 1000,
            "rope_local_base_freq": 1e4,
            "rope_theta": 1e5,
            "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": [0.0] * 5,
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        }
    },
    "deepseek_v3": {
        **SIZES,
        **EXPERTS,
        "num_hidden_layers": 2,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "topk_method": "noaux_tc",
        "kv_lora_rank": 32,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
}
NAMES = list(MODELS)

KINDS = {
    "llama": {KVCache},
    "gemma3_text": {KVCache, RotatingKVCache},
    "gpt_oss": {KVCache, RotatingKVCache},
    "qwen3_5": {KVCache, RecurrentCache},
    "qwen3_next": {KVCache, RecurrentCache},
    "llama4": {KVCache, ChunkedKVCache},
    "gemma3n": {KVCache, RotatingKVCache},
    "deepseek_v3": {KVCache},
}


@pytest.fixture(scope="module")
def model_of():
    """Make a model of mlx-lm's by name, with random weights large enough to matter."""
    made: dict[str, Any] = {}

    def build(name):
        if name not in made:
            module = importlib.import_module(f"mlx_lm.models.{name}")
            mx.random.seed(11)
            model = module.Model(module.ModelArgs.from_dict({"model_type": name, **MODELS[name]}))
            model.update(tree_map(lambda each: each * 1.5 if each.ndim > 1 else each, model.parameters()))
            mx.eval(model.parameters())
            made[name] = model.eval()
        return made[name]

    return build


def ids(count, seed=3):
    return mx.random.randint(0, VOCABULARY, (1, count), key=mx.random.key(seed))


def logits_in_chunks(model, tokens, caches, chunks):
    """The logits of every position, the sequence cut as told and then one by one."""
    outputs, start = [], 0
    for count in [*chunks, *[1] * (tokens.shape[1] - sum(chunks))]:
        outputs.append(model(tokens[:, start : start + count], cache=caches))
        mx.eval(outputs[-1])
        start += count
    return mx.concatenate(outputs, axis=1)


CHUNKS = {"one prompt": [40], "chunks": [7, 30, 5, 26]}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_logits_are_those_of_mlx_lms_own_caches(model_of, name, chunks):
    """Prefill in chunks, decode past the wrap and over a slab border: equal within 1e-4 (float32)."""
    model, tokens = model_of(name), ids(80)
    caches = make_prompt_cache(model)
    assert {type(cache) for cache in caches} == KINDS[name]
    got = logits_in_chunks(model, tokens, caches, chunks)
    wanted = logits_in_chunks(model, tokens, make_mlx_lm_cache(model), chunks)
    assert mx.abs(wanted).max().item() > 0.1
    assert mx.abs(got - wanted).max().item() <= 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_generation_takes_them_as_they_are(model_of, name):
    """mlx-lm's generation loop gives the same greedy tokens, and the caches go on in the next turn."""
    model, results = model_of(name), []
    for make in (make_prompt_cache, make_mlx_lm_cache):
        caches, tokens = make(model), []
        for prompt in (ids(260, 1)[0], ids(9, 2)[0]):
            steps = generate_step(prompt, model, max_tokens=6, prompt_cache=caches, prefill_step_size=100)
            tokens += [token for token, _ in steps]
        results.append(tokens)
    assert results[0] == results[1]


@pytest.mark.parametrize("name", NAMES)
def test_the_geometry_read_off_used_caches_foretells_their_bytes(model_of, name):
    """One token through the model is enough to know what any number of tokens costs."""
    model = model_of(name)
    caches = make_prompt_cache(model)
    model(ids(1), cache=caches)
    spec = cache_spec_of(caches)
    if name == "deepseek_v3":
        assert spec.layers[0] == LayerSpec.full(num_kv_heads=1, key_head_dim=32, value_head_dim=32)
    model(ids(300), cache=caches)
    for cache in caches:
        if isinstance(cache, RotatingKVCache):
            cache.compact()
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()
    assert sum(cache.nbytes for cache in caches) == kv_bytes_at(spec, 301)


def uncached_logits(model, name, tokens, first_chunk, bits, appended, patch):
    """One forward without caches in which positions see earlier ones as the scheme would hold them.

    Queries of the first chunk see everything unquantized; later ones see quantized keys and values, their own too.
    What passes the quantizer is what the caches got, once it is seen to be what this forward has: else a last bit
    could tip a rounding.
    """
    layers = iter(appended)

    def passed(array):
        return mx.dequantize(*mx.quantize(array, group_size=32, bits=bits), group_size=32, bits=bits)

    def attention(queries, keys, values, cache, scale, mask, sinks=None):
        given = [mx.concatenate(list(parts), axis=2) for parts in zip(*next(layers), strict=True)]
        for own, other in zip((keys, values), given, strict=True):
            assert mx.abs(own - other).max().item() <= 1e-4
        columns = mx.arange(keys.shape[2])
        if isinstance(mask, str) or mask is None:
            mask = columns <= columns[:, None]
        first, rest = slice(0, first_chunk), slice(first_chunk, None)
        parts = [
            mx.fast.scaled_dot_product_attention(
                queries[:, :, which], *held, mask=mask[which], scale=scale, sinks=sinks
            )
            for which, held in ((first, given), (rest, [passed(each) for each in given]))
        ]
        return mx.concatenate(parts, axis=2)

    patch.setattr(importlib.import_module(f"mlx_lm.models.{name}"), "scaled_dot_product_attention", attention)
    return model(tokens)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_caches_are_an_uncached_forward_through_the_quantizer(model_of, name, bits, monkeypatch):
    """Within 1e-4 (float32), past a wrap and with attention sinks too: mlx-lm refuses to quantize either."""
    model, tokens, chunks = model_of(name), ids(90), [40, 3, 2]
    caches = make_prompt_cache(model, scheme=KVScheme.uniform(bits, 32))
    appended = {id(cache): [] for cache in caches}
    plain = model(tokens)
    with monkeypatch.context() as patch:
        append = ConvertingCache.update_and_fetch

        def recorded(cache, keys, values):
            appended[id(cache)].append((keys, values))
            return append(cache, keys, values)

        patch.setattr(ConvertingCache, "update_and_fetch", recorded)
        got = logits_in_chunks(model, tokens, caches, chunks)
        wanted = uncached_logits(model, name, tokens, chunks[0], bits, appended.values(), patch)
    assert mx.abs(got - wanted).max().item() <= 1e-4
    assert mx.abs(got - plain).max().item() > 1e-3, "the quantizer must be seen to matter"
    held = {type(cache.cache) for cache in caches}
    assert held == {QuantizedKVCache} | ({RotatingQuantizedKVCache} if RotatingKVCache in KINDS[name] else set())


@pytest.mark.parametrize("name", NAMES)
def test_converting_by_hand_is_what_the_caches_do_themselves(model_of, name):
    """`convert` after the first chunk gives the same logits bit for bit as caches made with the scheme."""
    model, tokens, scheme = model_of(name), ids(70), KVScheme.uniform(8, 32)
    by_hand = make_prompt_cache(model)
    first = model(tokens[:, :40], cache=by_hand)
    assert scheme.convert(by_hand) == sum(
        isinstance(cache, KVCache | RotatingKVCache) for cache in make_prompt_cache(model)
    )
    rest = logits_in_chunks(model, tokens[:, 40:], by_hand, [3])
    themselves = logits_in_chunks(model, tokens, make_prompt_cache(model, scheme=scheme), [40, 3])
    assert mx.array_equal(mx.concatenate([first, rest], axis=1), themselves)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_5"])
def test_mlx_lms_own_switch_quantizes_them(model_of, name):
    """`kv_bits` of mlx-lm's generation converts Headrace's caches, rings too, where its own rings kill the request."""
    model, caches = model_of(name), make_prompt_cache(model_of(name))
    steps = generate_step(
        ids(50, 1)[0], model, max_tokens=8, prompt_cache=caches, kv_bits=8, kv_group_size=32, quantized_kv_start=0
    )
    tokens = [token for token, _ in steps]
    plain = [token for token, _ in generate_step(ids(50, 1)[0], model, max_tokens=8)]
    assert len(tokens) == 8
    assert tokens[0] == plain[0]
    assert not any(isinstance(cache, KVCache | RotatingKVCache) for cache in caches)


def test_a_bound_keeps_the_first_tokens_and_gives_the_same_whatever_the_chunks(model_of):
    """`max_kv_size` makes rings that keep four tokens; mlx-lm's drop them again in prefill chunks past the wrap."""
    model, tokens = model_of("llama"), ids(70)
    logits = [
        logits_in_chunks(model, tokens, make_prompt_cache(model, max_kv_size=WINDOW), chunks)
        for chunks in ([1], *CHUNKS.values())
    ]
    for other in logits[1:]:
        assert mx.abs(other - logits[0]).max().item() <= 1e-4
    wanted = logits_in_chunks(model, tokens, [MlxLmRing(WINDOW, keep=4) for _ in model.layers], [1])
    assert mx.abs(logits[0] - wanted).max().item() <= 1e-4


@pytest.mark.parametrize("name", [name for name in NAMES if RecurrentCache not in KINDS[name]])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_a_state_of_mlx_lms_is_taken_over(model_of, name, chunks):
    """Caches made from the states of mlx-lm's own, wrapped or not, go on as those would."""
    model, tokens = model_of(name), ids(80)
    theirs = make_mlx_lm_cache(model)
    logits_in_chunks(model, tokens[:, :72], theirs, chunks)
    ours = [type(own).from_state(cache.state) for own, cache in zip(make_prompt_cache(model), theirs, strict=True)]
    for count in (1, 3, 4):
        part = tokens[:, 72 : 72 + count]
        assert mx.abs(model(part, cache=ours) - model(part, cache=theirs)).max().item() <= 1e-4


def model_sources():
    return sorted(Path(mlx_lm.models.cache.__file__).parent.glob("*.py"))


def test_every_cache_class_that_a_model_imports_has_a_twin():
    """A cache class that a new mlx-lm brings into its models fails here, not at a user's."""
    imported = {
        alias.name
        for path in model_sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.level, node.module) == (1, "cache")
        for alias in node.names
        if isinstance(getattr(mlx_lm.models.cache, alias.name, None), type)
    }
    assert {"KVCache", "RotatingKVCache", "ArraysCache"} <= imported
    assert imported - set(_TWINS) <= {"_BaseCache"}


def test_models_that_ask_for_a_cache_class_are_known():
    """Only mamba does so outside of pipelines, and is refused."""
    asking = {
        path.stem for path in model_sources() if "isinstance(cache, ArraysCache)" in path.read_text(encoding="utf-8")
    }
    assert {f"mlx_lm.models.{name}" for name in asking} == _BOUND_TO_A_CLASS


def test_other_kinds_are_refused_with_their_layer(model_of):
    """A cache without a twin, a model bound to mlx-lm's class, a scheme for a layer that cannot have it."""

    class Strange:
        def make_cache(self):
            return [KVCache(), object()]

    class Lists:
        def make_cache(self):
            return [CacheList(KVCache(), RecurrentCache(1))]

    with pytest.raises(UnsupportedCache, match="layer 1"):
        make_prompt_cache(Strange())
    assert isinstance(make_prompt_cache(Lists())[0], CacheList)
    with pytest.raises(InvalidScheme, match="layer 0"):
        make_prompt_cache(model_of("qwen3_5"), scheme=KVScheme.per_layer([(0, 4, 32)]))
    with pytest.raises(InvalidScheme, match="32"):
        model_of("llama")(ids(2), cache=make_prompt_cache(model_of("llama"), scheme=KVScheme.uniform(4, 64)))
    module = importlib.import_module("mlx_lm.models.mamba")
    with pytest.raises(UnsupportedCache, match="mamba"):
        make_prompt_cache(module.Model.__new__(module.Model))
