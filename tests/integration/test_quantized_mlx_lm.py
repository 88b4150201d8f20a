"""Quantized folders, with bits per matrix, against mlx-lm: each reads what the other writes, with equal logits."""

import json
import shutil

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.models import llama, phi3, starcoder2
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from headrace_models import convert, load
from headrace_models.packing_plan import BitsRule

TOLERANCE = 1e-4
IDS = [[5, 77, 300, 4, 4, 19, 200, 31]]
BASE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
MODELS = {
    "llama": (llama, {"tie_word_embeddings": False}),
    "phi3": (phi3, {"tie_word_embeddings": False}),
    "starcoder2": (starcoder2, {"norm_epsilon": 1e-5, "hidden_act": "gelu", "use_bias": True}),
}


def by_name(path, _module):
    """Bits that differ within q, k, v and within gate and up, and modules that stay plain."""
    table = {
        "q_proj": {"bits": 8, "group_size": 32},
        "k_proj": {"bits": 3, "group_size": 64},
        "v_proj": False,
        "qkv_proj": {"bits": 5, "group_size": 64},
        "gate_proj": {"bits": 2, "group_size": 32},
        "o_proj": {"bits": 6, "group_size": 64},
        "embed_tokens": {"bits": 8, "group_size": 128},
        "lm_head": False,
        "c_proj": {"bits": 8, "group_size": 32},
    }
    return table.get(path.rsplit(".", 1)[-1], True)


def make_folder(folder, tokenizer_from, name, *, predicate=None, dtype=mx.float32):
    """A random checkpoint of mlx-lm's own class and writers, quantized by its own function if there is a predicate."""
    module, settings = MODELS[name]
    config = {**BASE, "model_type": name, **settings}
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(config))
    weights = [(path, mx.random.normal(value.shape)) for path, value in tree_flatten(model.parameters())]
    model.load_weights(
        [
            (path, (1 + 0.1 * value if value.ndim == 1 else value * value.shape[-1] ** -0.5).astype(dtype))
            for path, value in weights
        ]
    )
    if predicate is not None:
        model, config = quantize_model(model, config, 64, 4, quant_predicate=predicate)
    folder.mkdir()
    save_model(folder, model)
    save_config(config, folder / "config.json")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / file, folder / file)
    return folder


def difference(folder, dtype="checkpoint") -> float:
    """Largest difference of logits between mlx-lm and Headrace on one folder, with activations in float32."""
    oracle, model = load_model(folder)[0], load(folder, dtype=dtype).model
    oracle.set_dtype(mx.float32)
    found = model.logits_from_hidden(model.forward_hidden(mx.array(IDS, dtype=mx.int32), model.make_cache()))
    return mx.abs(found - oracle(mx.array(IDS))).max().item()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["checkpoint", "float32"])
def test_mixed_folders_of_mlx_lm_load(tmp_path, tiny_llama, name, dtype):
    """Overrides per module and plain modules among packed ones, fused parts included: equal logits."""
    folder = make_folder(tmp_path / "model", tiny_llama, name, predicate=by_name)
    assert any(
        isinstance(value, dict) for value in json.loads((folder / "config.json").read_text())["quantization"].values()
    )
    assert difference(folder, dtype) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_converted_folders_load_in_mlx_lm(tmp_path, tiny_llama, name):
    """With rules for single modules: mlx-lm computes Headrace's logits."""
    rules = [
        BitsRule(pattern="model.layers.*.self_attn.[qk]*_proj", bits=8, group_size=32),
        BitsRule(pattern="*.1.*", bits=3),
        BitsRule(pattern="*.2.*", bits=None),
        BitsRule(pattern="model.embed_tokens", bits=6, group_size=128),
    ]
    source = make_folder(tmp_path / "model", tiny_llama, name)
    assert difference(convert(source, tmp_path / "out", rules=rules)) < TOLERANCE


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("recipe", [None, "mixed_2_6", "mixed_3_4", "mixed_4_6"])
def test_conversion_equals_mlx_lms(tmp_path, tiny_llama, recipe, dtype):
    """Bit for bit the tensors that mlx-lm's own conversion writes, and settings that say the same."""
    source = make_folder(tmp_path / "model", tiny_llama, "llama", dtype=dtype)
    model, config = load_model(source)
    predicate = None if recipe is None else mixed_quant_predicate_builder(recipe, model, 64)
    model, config = quantize_model(model, config, 64, 4, quant_predicate=predicate)
    expected = dict(tree_flatten(model.parameters()))
    folder = convert(source, tmp_path / "out", recipe=recipe)
    found = mx.load(str(folder / "model.safetensors"))
    assert found.keys() == expected.keys()
    assert all(mx.array_equal(found[name], tensor).item() for name, tensor in expected.items())
    assert difference(folder, "float32") < TOLERANCE


@pytest.mark.model
@pytest.mark.parametrize("bits", [4, 8])
def test_the_starter_model_converts(tmp_path, smollm2, bits):
    """Real weights from GGUF: mlx-lm and Headrace agree on the converted folder."""
    rules = [BitsRule(pattern="model.embed_tokens", bits=8)]
    folder = convert(smollm2, tmp_path / "out", bits=bits, group_size=32, dtype="float32", rules=rules)
    oracle, model = load_model(folder)[0], load(folder, dtype="checkpoint").model
    ids = mx.array([[504, 3575, 282, 4649, 314]], dtype=mx.int32)
    found = model.logits_from_hidden(model.forward_hidden(ids, model.make_cache()))
    expected = oracle(ids)
    assert mx.abs(found - expected).max().item() < 2e-3
    assert mx.array_equal(mx.argmax(found, -1), mx.argmax(expected, -1)).item()
