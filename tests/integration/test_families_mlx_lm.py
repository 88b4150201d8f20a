"""Every dense family against mlx-lm's own class on the same files: an oracle that nobody here wrote.

A case is a configuration. mlx-lm makes the model, random weights fill it, its own writer saves the checkpoint, and both
sides load that. Sequences pass prefill, chunks, decode, ragged rows in slots, and the wrap of windows.
"""

import json
import shutil
from importlib import import_module

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from headrace_kvcache import make_row_batch
from headrace_models import convert, export, fit_source, load
from headrace_models.families import FAMILIES

FLOAT32_TOLERANCE = 1e-4
# Root mean square errors of both sides against float32; where they round differs, so neither is always nearer.
BFLOAT16_RATIO = 1.2
QUANTIZE = {"group_size": 32, "bits": 4, "mode": "affine"}

IDS = [5, 77, 300, 4, 4, 19, 200, 31, 8, 9, 111, 54, 2, 250, 17, 63, 91, 128, 7, 33, 180, 240, 12, 99]
CONTINUATION = list(range(40, 50))
ROWS = [IDS, IDS[3:4], IDS[5:14]]

BASE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [1.0 + 0.7 * index for index in range(8)],
}
GEMMA = {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh"}
GEMMA2 = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24}
GEMMA3 = {"query_pre_attn_scalar": 24, "sliding_window": 8, "sliding_window_pattern": 3, "rope_local_base_freq": 500.0}
GRANITE = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 4.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "attention_bias": False,
    "mlp_bias": False,
}
GEMMA4_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
GEMMA4 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 6,
    "layer_types": GEMMA4_LAYERS,
    "sliding_window": 8,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 320,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
# As the larger models are: nothing shared, no inputs per layer, keys that are values in full layers.
GEMMA4_LARGE = {
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GLM4 = {"head_dim": 16, "attention_bias": True, "partial_rotary_factor": 0.5, "tie_word_embeddings": False}
STARCODER2 = {"norm_epsilon": 1e-5, "hidden_act": "gelu", "use_bias": True}

CASES = {
    "gemma": ("gemma", {**GEMMA, "hidden_activation": "gelu"}),
    "gemma2": ("gemma2", GEMMA | GEMMA2),
    "gemma3": ("gemma3_text", GEMMA | GEMMA3),
    "gemma3-linear-rope": ("gemma3_text", GEMMA | GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4-large": ("gemma4_text", GEMMA4 | GEMMA4_LARGE),
    "gemma4-keys-shared": ("gemma4_text", GEMMA4 | GEMMA4_LARGE | {"num_kv_shared_layers": 3}),
    "gemma4-untied": ("gemma4_text", GEMMA4 | {"tie_word_embeddings": False, "num_kv_shared_layers": 1}),
    "glm4": ("glm4", GLM4),
    "glm4-unbiased": ("glm4", GLM4 | {"attention_bias": False, "partial_rotary_factor": 1.0}),
    "granite": ("granite", GRANITE),
    "granite-untied": ("granite", GRANITE | {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "llama-windows": ("llama", {"layer_types": MIXED, "sliding_window": 6}),
    "llama-traditional": ("llama", {"rope_traditional": True, "rope_scaling": LLAMA3}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "mistral": ("mistral", {"head_dim": 32, "tie_word_embeddings": False}),
    "olmo2": ("olmo2", {}),
    "olmo2-yarn": ("olmo2", {"rope_scaling": YARN | {"beta_fast": 16, "beta_slow": 2, "mscale": 0.8}}),
    "phi3": ("phi3", {"tie_word_embeddings": False}),
    "phi3-longrope": ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 32}),
    "phi3-partial-longrope": (
        "phi3",
        {
            "rope_scaling": {**LONGROPE, "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 5.0]},
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.5,
        },
    ),
    "phi3-linear": ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0, "long_factor": [1.0]}}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False, "sliding_window": 4, "use_sliding_window": False}),
    "qwen2-yarn": ("qwen2", {"rope_scaling": YARN}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-untied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": False, "rope_scaling": LLAMA3}),
    "smollm3": ("smollm3", {}),
    "smollm3-listed": ("smollm3", {"no_rope_layers": [0, 1, 1, 0], "tie_word_embeddings": False}),
    "starcoder2": ("starcoder2", STARCODER2),
    "starcoder2-untied": ("starcoder2", STARCODER2 | {"tie_word_embeddings": False}),
}
ONE_EACH = [
    "gemma",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-large",
    "glm4",
    "granite",
    "llama-windows",
    "mistral",
    "olmo2",
    "phi3-longrope",
]
ONE_EACH += ["qwen2", "qwen3", "smollm3", "starcoder2"]


def make_folder(folder, tokenizer_from, case, *, quantize=None, dtype=mx.float32):
    """Write a random checkpoint with mlx-lm's own classes and writers."""
    model_type, settings = CASES[case]
    config = {**BASE, "model_type": model_type, **settings}
    module = import_module(f"mlx_lm.models.{'llama' if model_type == 'mistral' else model_type}")
    mx.random.seed(11)
    model = module.Model(module.ModelArgs.from_dict(config))
    if model_type == "gemma3_text":
        model.sanitize({})
    return _save_random(folder, tokenizer_from, model, config, quantize, dtype)


def _save_random(folder, tokenizer_from, model, config, quantize, dtype=mx.float32):
    model.load_weights([(name, _random(name, value.shape).astype(dtype)) for name, value in _flat(model)])
    if quantize is not None:
        model, config = quantize_model(model, config, **quantize)
    folder.mkdir(exist_ok=True)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)
    return folder


def make_wrapped_folder(folder, tokenizer_from, case, *, quantize=None):
    """As `make_folder`, with mlx-lm's class around the text model's, and tensors of towers in the file."""
    text_type, settings = CASES[case]
    model_type = text_type.removesuffix("_text")
    config = {"model_type": model_type, "vocab_size": 320, "eos_token_id": [2]}
    module = import_module(f"mlx_lm.models.{model_type}")
    text_config = {**BASE, "model_type": text_type, **settings}
    mx.random.seed(11)
    model = module.Model(module.ModelArgs.from_dict({**config, "text_config": dict(text_config)}))
    if model_type == "gemma3":
        model.language_model.sanitize({})
    _save_random(folder, tokenizer_from, model, {**config, "text_config": text_config}, quantize)
    path = str(folder / "model.safetensors")
    towers = {"vision_tower.encoder.weight": mx.ones((4, 4)), "multi_modal_projector.weight": mx.ones((4,))}
    mx.save_safetensors(path, {**mx.load(path), **towers})
    (folder / "model.safetensors.index.json").unlink()
    return folder


def _flat(model):
    return tree_flatten(model.parameters())


def _random(name: str, shape) -> mx.array:
    noise = mx.random.normal(shape)
    if name.endswith(("norm.weight", "norm.bias", "layer_scalar")):
        return 0.1 * noise + (0 if name.endswith("bias") else 1)
    return noise * shape[-1] ** -0.5 if len(shape) > 1 else 0.1 * noise


def oracle_logits(oracle, ids: list[int]) -> mx.array:
    """`(T, V)` of one sequence, in one pass of mlx-lm's model."""
    return oracle(mx.array([ids]), cache=make_prompt_cache(oracle))[0]


def native_logits(model, ids: list[list[int]], caches) -> mx.array:
    found = model.logits_from_hidden(model.forward_hidden(mx.array(ids, dtype=mx.int32), caches))
    mx.eval(found)
    return found


def passes(model):
    """Yield `(ids, start, logits)`: one prefill, chunks, decode, and ragged rows in slots prefilled together."""
    for sizes in ([24], [5, 7, 12], [10, *[1] * 14]):
        caches, start = model.make_cache(), 0
        for size in sizes:
            yield IDS, start, native_logits(model, [IDS[start : start + size]], caches)[0]
            start += size
    batch = make_row_batch(model.make_cache(), max_rows=4)
    slots, lengths = [batch.join() for _ in ROWS], [len(row) for row in ROWS]
    padded = [row + [0] * (max(lengths) - len(row)) for row in ROWS]
    found = native_logits(model, padded, batch.view(slots, max(lengths), lengths=lengths))
    batch.advance(slots, lengths)
    for index, row in enumerate(ROWS):
        yield row + CONTINUATION, 0, found[index, : len(row)]
    for step, token in enumerate(CONTINUATION):
        found = native_logits(model, [[token]] * len(slots), batch.view(slots, 1))
        batch.advance(slots, 1)
        for index, row in enumerate(ROWS):
            yield row + CONTINUATION, len(row) + step, found[index]


def differences(model, oracle) -> mx.array:
    """Every logit of every pass, less the oracle's."""
    expected, found = {}, []
    for ids, start, logits in passes(model):
        if tuple(ids) not in expected:
            expected[tuple(ids)] = oracle_logits(oracle, ids)
        wanted = expected[tuple(ids)][start : start + logits.shape[0]]
        assert logits.shape == wanted.shape
        found.append(mx.flatten(logits.astype(mx.float32) - wanted.astype(mx.float32)))
    return mx.concatenate(found)


def largest_difference(folder, dtype: str) -> float:
    oracle, _ = load_model(folder)
    return mx.abs(differences(load(folder, dtype=dtype).model, oracle)).max().item()


def test_every_family_has_a_case():
    """A family that is added without an oracle fails here."""
    assert {model_type for model_type, _ in CASES.values()} == set(FAMILIES)
    assert {CASES[case][0] for case in ONE_EACH} == set(FAMILIES)


@pytest.mark.parametrize("case", CASES)
def test_float32_logits_equal_mlx_lm(tiny_llama, tmp_path, case):
    """Prefill, chunks, decode, ragged rows and wraps, within 1e-4."""
    folder = make_folder(tmp_path / "model", tiny_llama, case)
    assert largest_difference(folder, "float32") < FLOAT32_TOLERANCE


def test_layers_of_gemma_4_that_share_own_no_cache(tiny_llama, tmp_path):
    """Caches, and slots, are those of the layers that make keys and values; embeddings alone are not enough."""
    model = load(make_folder(tmp_path / "model", tiny_llama, "gemma4"), dtype="float32").model
    assert (len(model.layers), len(model.make_cache()), model.num_caches) == (6, 3, 3)
    assert make_row_batch(model.make_cache(), max_rows=2).num_layers == 3
    ids = mx.array([IDS])
    expected = model.forward_hidden(ids, model.make_cache())
    found = model.forward_embeddings(model.embedding(ids), model.make_cache(), ids=ids)
    assert mx.array_equal(found, expected).item()
    with pytest.raises(ValueError, match="ids"):
        model.forward_embeddings(model.embedding(ids), model.make_cache())
    with pytest.raises(ValueError, match="4 caches"):
        model.forward_hidden(ids, [*model.make_cache(), model.make_cache()[0]])


def test_unread_keys_of_sharing_layers_change_nothing(tiny_llama, tmp_path):
    """Released checkpoints carry keys and values of layers that share those of others; both sides leave them out."""
    folder = make_folder(tmp_path / "model", tiny_llama, "gemma4")
    path = str(folder / "model.safetensors")
    unread = {f"model.layers.5.self_attn.{name}_proj.weight": mx.ones((64, 64)) for name in "kv"}
    mx.save_safetensors(path, {**mx.load(path), **unread, "model.layers.5.self_attn.k_norm.weight": mx.ones((32,))})
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    assert largest_difference(folder, "float32") < FLOAT32_TOLERANCE


@pytest.mark.parametrize("case", ["gemma3", "gemma4"])
def test_the_text_model_of_a_wrapper_equals_mlx_lm(tiny_llama, tmp_path, case):
    """mlx-lm's class for models that see and hear: equal logits, plain and packed, and as `convert` writes the text."""
    folder = make_wrapped_folder(tmp_path / "plain", tiny_llama, case)
    assert largest_difference(folder, "float32") < FLOAT32_TOLERANCE
    loaded = load(folder, dtype="float32")
    assert loaded.left_out == {"vision_tower": 1, "multi_modal_projector": 1}
    assert fit_source(loaded.source, num_tokens=64, dtype="float32").weights_bytes == loaded.model.weights_bytes
    packed = make_wrapped_folder(tmp_path / "packed", tiny_llama, case, quantize=QUANTIZE)
    assert largest_difference(packed, "checkpoint") < FLOAT32_TOLERANCE
    source = load(packed, dtype="checkpoint")
    assert fit_source(source.source, num_tokens=64, dtype="checkpoint").weights_bytes == source.model.weights_bytes
    converted = convert(folder, tmp_path / "converted", bits=4, group_size=32)
    assert largest_difference(converted, "checkpoint") < FLOAT32_TOLERANCE
    # Packed from the same weights, whichever program did it and whatever is around the text model.
    ids = [IDS]
    found, expected = (
        native_logits(model, ids, model.make_cache())
        for model in (load(converted, dtype="checkpoint").model, source.model)
    )
    assert mx.abs(found - expected).max().item() < FLOAT32_TOLERANCE


class WindowedAttention:
    """mlx-lm's attention under a window that its model class leaves out."""

    def __init__(self, attention, window: int) -> None:
        self.attention, self.window = attention, window

    def __call__(self, x, _mask, cache):
        return self.attention(x, create_causal_mask(x.shape[1], window_size=self.window), cache)


@pytest.mark.parametrize(
    ("case", "settings", "sliding"),
    [
        ("gemma2", {"sliding_window": 6}, [0, 2]),
        ("mistral", {"sliding_window": 6}, [0, 1, 2, 3]),
        ("phi3", {"sliding_window": 6}, [0, 1, 2, 3]),
        ("qwen2", {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 3}, [3]),
        ("starcoder2", {"sliding_window": 6}, [0, 1, 2, 3]),
    ],
)
def test_windows_that_mlx_lm_leaves_out(tiny_llama, tmp_path, case, settings, sliding):
    """Checkpoints of these families were trained with windows: mlx-lm's layers, each under its window, agree."""
    folder = make_folder(tmp_path / "model", tiny_llama, case)
    oracle, config = load_model(folder)
    save_config(config | settings, folder / "config.json")
    for index in sliding:
        layer = oracle.layers[index]
        layer.self_attn = WindowedAttention(layer.self_attn, settings["sliding_window"])
    assert mx.abs(differences(load(folder, dtype="float32").model, oracle)).max().item() < FLOAT32_TOLERANCE


@pytest.mark.parametrize("case", ONE_EACH)
def test_packed_logits_equal_mlx_lm(tiny_llama, tmp_path, case):
    """4-bit weights through the packed product, within 1e-4."""
    folder = make_folder(tmp_path / "model", tiny_llama, case, quantize=QUANTIZE)
    assert "quantization" in json.loads((folder / "config.json").read_text())
    assert largest_difference(folder, "checkpoint") < FLOAT32_TOLERANCE


@pytest.mark.parametrize("case", ONE_EACH)
def test_bfloat16_is_as_near_to_float32_as_mlx_lm(tiny_llama, tmp_path, case):
    """The checkpoint's own dtype: the mean error against float32 sums of the same weights is no more than mlx-lm's."""
    folder = make_folder(tmp_path / "model", tiny_llama, case, dtype=mx.bfloat16)
    rounded, _ = load_model(folder)
    exact, _ = load_model(folder)
    exact.set_dtype(mx.float32)
    error = differences(load(folder, dtype="checkpoint").model, exact)
    expected = mx.concatenate(
        [oracle_logits(rounded, row + CONTINUATION) - oracle_logits(exact, row + CONTINUATION) for row in ROWS]
    )
    assert mx.sqrt(mx.mean(error**2)).item() < BFLOAT16_RATIO * mx.sqrt(mx.mean(expected**2)).item()


@pytest.mark.parametrize("case", ONE_EACH)
def test_an_exported_folder_is_the_same_model(tiny_llama, tmp_path, case):
    """mlx-lm reads what `export` writes, with equal tensors and the logits of Headrace."""
    made = make_folder(tmp_path / "model", tiny_llama, case)
    oracle, _ = load_model(export(made, tmp_path / "out"))
    original, _ = load_model(made)
    assert all(
        mx.array_equal(left, right) for (_, left), (_, right) in zip(_flat(oracle), _flat(original), strict=True)
    )
    assert mx.array_equal(oracle_logits(oracle, IDS), oracle_logits(original, IDS)).item()
