"""GGUF files of every family, written with the gguf package as llama.cpp's converter writes them, against folders.

The same random weights are a safetensors folder and a GGUF file; both must give the same logits. Names come from the
gguf package's own map, keys from its writer; row order and shifted norms are written here as the converter does it.
"""

import json
import shutil
import sys

import gguf
import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace_models import export, load, read_config, resolve
from headrace_models.device import DeviceProfile
from headrace_models.errors import UnsupportedArchitecture, UnsupportedFormat
from headrace_models.families import FAMILIES
from headrace_models.gguf_families import GGUF_FAMILIES
from headrace_models.tensors import tensor_shapes

TOLERANCE = 1e-4
IDS = [[5, 77, 300, 4, 4, 19, 200, 31, 8, 9, 111, 54, 2, 250]]
BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
UNTIED = {"tie_word_embeddings": False}
GEMMA = {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh"}
SOFTCAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
GRANITE = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 4.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [1.0 + 0.7 * index for index in range(8)],
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
STARCODER2 = {"norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "use_bias": True}

# A case is the architecture in the file, the model type, and the settings that differ.
CASES = {
    "gemma": ("gemma", "gemma", GEMMA),
    "gemma2": ("gemma2", "gemma2", GEMMA | SOFTCAPS | {"sliding_window": 6, "query_pre_attn_scalar": 32}),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        GEMMA | {"sliding_window": 6, "query_pre_attn_scalar": 32, "rope_local_base_freq": 10000.0},
    ),
    "gemma3-linear": (
        "gemma3",
        "gemma3_text",
        GEMMA
        | {"sliding_window": 6, "query_pre_attn_scalar": 32, "rope_local_base_freq": 500.0}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "glm4": ("glm4", "glm4", UNTIED | {"head_dim": 16, "attention_bias": True, "partial_rotary_factor": 0.5}),
    "glm4-unbiased": ("glm4", "glm4", UNTIED | {"head_dim": 32, "attention_bias": False}),
    "granite": ("granite", "granite", GRANITE),
    "llama": ("llama", "llama", UNTIED),
    "llama-biased": ("llama", "llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama-yarn": ("llama", "llama", {"rope_scaling": YARN | {"beta_fast": 16.0, "beta_slow": 2.0}}),
    "mistral": ("llama", "mistral", UNTIED | {"head_dim": 32}),
    "olmo2": ("olmo2", "olmo2", UNTIED),
    "phi3": ("phi3", "phi3", UNTIED | {"sliding_window": 6}),
    "phi3-longrope": ("phi3", "phi3", UNTIED | {"rope_scaling": LONGROPE}),
    "phi3-partial": ("phi3", "phi3", {"partial_rotary_factor": 0.75}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen2-yarn": ("qwen2", "qwen2", {"rope_scaling": YARN}),
    "qwen3": ("qwen3", "qwen3", UNTIED | {"head_dim": 32}),
    "smollm3": ("smollm3", "smollm3", {}),
    "starcoder2": ("starcoder2", "starcoder2", STARCODER2),
    "starcoder2-untied": ("starcoder2", "starcoder2", STARCODER2 | UNTIED),
}
PERMUTED = {"llama", "granite", "smollm3"}
SHIFTED = {"gemma", "gemma2", "gemma3"}


def test_every_family_of_files_has_a_case():
    """And every dense family but those that need more than their own keys is read."""
    assert {model_type for _, model_type, _ in CASES.values()} == set(GGUF_FAMILIES) | {"mistral"}
    assert set(FAMILIES) - set(GGUF_FAMILIES) == {"mistral", "gemma4_text"}


def make_folder(folder, tokenizer_from, case):
    """A folder with random weights for a case."""
    _, model_type, settings = CASES[case]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**BASE, "model_type": model_type, **settings}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)
    (folder / "model.safetensors").write_bytes(b"")
    random = np.random.default_rng(5)
    tensors = {}
    for name, shape in tensor_shapes(read_config(resolve(folder))).items():
        noise = random.standard_normal(shape, dtype=np.float32)
        if len(shape) > 1:
            tensors[name] = noise * shape[-1] ** -0.5
        else:
            tensors[name] = 0.1 * noise + (1 if name.endswith("norm.weight") and "gemma" not in model_type else 0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def make_gguf(path, case, tensors, *, matrix_type=gguf.GGMLQuantizationType.F32):
    """The same model as llama.cpp's converter would write it."""
    architecture, _, settings = CASES[case]
    config = {**BASE, **settings}
    writer = gguf.GGUFWriter(str(path), architecture)
    write_settings(writer, architecture, config)
    write_vocabulary(writer)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in tensors.items():
        module, part = name.rsplit(".", 1)
        stored, kind = values, gguf.GGMLQuantizationType.F32
        if architecture in PERMUTED and module.rsplit(".", 1)[-1] in heads:
            stored = permuted(values, heads[module.rsplit(".", 1)[-1]])
        if architecture in SHIFTED and module.endswith("norm"):
            stored = values + 1
        if values.ndim > 1:
            kind = matrix_type
        blocks = gguf.quants.quantize(stored, kind)
        found = names.get_name(module)
        assert found is not None, module
        writer.add_tensor(f"{found}.{part}", blocks, raw_dtype=kind)
    for field in ("long", "short"):
        factors = config.get("rope_scaling", {}).get(f"{field}_factor")
        if factors is not None:
            writer.add_tensor(f"rope_factors_{field}.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(rows, num_heads):
    return (
        rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    )


def write_settings(writer, architecture, config):
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if "head_dim" in config:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if architecture in ("llama", "granite", "smollm3", "phi3", "glm4"):
        writer.add_rope_dimension_count(int(head_dim * config.get("partial_rotary_factor", 1.0)))
    if architecture == "starcoder2":
        writer.add_layer_norm_eps(config["norm_epsilon"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if architecture == "phi3" or "sliding_window" in config:
        writer.add_sliding_window(config.get("sliding_window", 0))
    if "attn_logit_softcapping" in config:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("rope_local_base_freq", 10_000.0) != 10_000.0:
        writer.add_rope_freq_base_swa(config["rope_local_base_freq"])
    if architecture == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    write_rope_scaling(writer, config.get("rope_scaling", {}), config)


def write_rope_scaling(writer, scaling, config):
    if "long_factor" in scaling:
        original = scaling["original_max_position_embeddings"]
        factor = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(factor) / np.log(original))))
    elif scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        if scaling["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "beta_fast" in scaling:
            writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])


def write_vocabulary(writer):
    """Byte-level BPE with one merge, padded as converters do."""
    alphabet = sorted(gguf_alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "ab"]
    tokens += [f"[PAD{index}]" for index in range(BASE["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(alphabet) + 1) + [5] * (len(tokens) - 4 - len(alphabet)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def gguf_alphabet():
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()


def logits(source, dtype="float32"):
    loaded = load(source, dtype=dtype)
    ids = mx.array(IDS, dtype=mx.int32)
    return loaded.model.logits_from_hidden(loaded.model.forward_hidden(ids, loaded.model.make_cache()))


@pytest.mark.parametrize("case", CASES)
def test_a_gguf_file_is_the_folder_s_model(tmp_path, tiny_llama, case):
    """Logits equal those of the same weights as a folder, and the configurations agree in what they compute."""
    tensors = make_folder(tmp_path / "folder", tiny_llama, case)
    path = make_gguf(tmp_path / "model.gguf", case, tensors)
    found, expected = logits(path), logits(tmp_path / "folder")
    assert mx.abs(expected).max().item() > 0.1
    assert mx.abs(found - expected).max().item() < TOLERANCE
    left, right = read_config(resolve(path)), read_config(resolve(tmp_path / "folder"))
    for name in ("vocab_size", "head_dim", "rope_theta", "max_positions", "tie_word_embeddings", "eos_token_ids"):
        assert getattr(left, name) == getattr(right, name), name


@pytest.mark.parametrize("case", ["gemma2", "glm4", "granite", "phi3-longrope", "smollm3", "starcoder2"])
def test_an_exported_gguf_file_is_the_same_model(tmp_path, tiny_llama, case):
    """Every setting that comes from metadata or tensors survives in config.json."""
    tensors = make_folder(tmp_path / "folder", tiny_llama, case)
    path = make_gguf(tmp_path / "model.gguf", case, tensors)
    out = export(path, tmp_path / "out")
    assert mx.abs(logits(out) - logits(tmp_path / "folder")).max().item() < TOLERANCE


@pytest.mark.parametrize("case", ["llama", "gemma2", "phi3", "qwen3"])
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_types_of_a_file_give_what_they_stand_for(tmp_path, tiny_llama, case, kind):
    """Logits equal those of a folder with the dequantized values, whether MLX packs the type or not."""
    kind = gguf.GGMLQuantizationType[kind]
    tensors = make_folder(tmp_path / "folder", tiny_llama, case)
    path = make_gguf(tmp_path / "model.gguf", case, tensors, matrix_type=kind)
    rounded = {
        name: gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind).reshape(values.shape)
        if values.ndim > 1
        else values
        for name, values in tensors.items()
    }
    save_file(rounded, tmp_path / "folder" / "model.safetensors", metadata={"format": "pt"})
    # MLX folds a block's zero point into a float16 offset, which costs up to one rounding of it.
    tolerance = 2e-2 if kind.name in ("Q4_0", "Q4_1", "Q8_0") else TOLERANCE
    assert mx.abs(logits(path) - logits(tmp_path / "folder")).max().item() < tolerance


def test_a_gpu_takes_decoded_files_in_sixteen_bits(tmp_path, tiny_llama, monkeypatch):
    """Types that MLX does not pack become bfloat16 on a GPU: float32 would take twice the memory for nothing."""
    tensors = make_folder(tmp_path / "folder", tiny_llama, "llama")
    path = make_gguf(tmp_path / "model.gguf", "llama", tensors, matrix_type=gguf.GGMLQuantizationType.Q5_0)
    profile = DeviceProfile(kind="metal", name="pretended", memory_bytes=2**40, num_cpus=1)
    monkeypatch.setattr(sys.modules["headrace_models.loading"], "profile", lambda: profile)
    assert load(path).representation == "bfloat16"


def test_longrope_needs_both_lists(tmp_path, tiny_llama):
    """A file with one of its two tensors is refused by the other's name."""
    tensors = make_folder(tmp_path / "folder", tiny_llama, "phi3-longrope")
    short = {**LONGROPE, "short_factor": None}
    CASES["cut"] = ("phi3", "phi3", UNTIED | {"rope_scaling": short})
    try:
        path = make_gguf(tmp_path / "model.gguf", "cut", tensors)
    finally:
        del CASES["cut"]
    with pytest.raises(ValueError, match="rope_factors_short"):
        load(path)


def test_other_architectures_are_refused_by_name(tmp_path):
    """An architecture that no family runs, and a family whose files are not read: the message lists what is."""
    for architecture, problem in (
        ("falcon", "'falcon'; known families: gemma"),
        ("gemma4_text", "only those of gemma"),
    ):
        writer = gguf.GGUFWriter(str(tmp_path / f"{architecture}.gguf"), architecture)
        write_settings(writer, architecture, BASE)
        write_vocabulary(writer)
        writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(UnsupportedArchitecture, match=problem):
            load(tmp_path / f"{architecture}.gguf")


def test_a_magnitude_that_is_not_computed_is_refused(tmp_path, tiny_llama):
    """Nothing that would change the answer is ignored: YaRN with a factor of its own."""
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    write_settings(writer, "llama", BASE | {"rope_scaling": YARN})
    writer.add_rope_scaling_attn_factors(1.5)
    write_vocabulary(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedFormat, match=r"attn_factor.*1\.5"):
        read_config(resolve(tmp_path / "model.gguf"))


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2", "gemma3_270m"])
def test_a_real_gguf_file_is_its_exported_folder(tmp_path, request, name):
    """Q4_1 and K-quants of real models: the folder that `export` writes gives the same logits."""
    source = request.getfixturevalue(name)
    assert mx.array_equal(logits(export(source, tmp_path / "out")), logits(source)).item()
