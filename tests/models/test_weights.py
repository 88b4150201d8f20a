"""Checkpoints: what does not fit is listed, and every way of storing weights gives the same weights."""

import json

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants

from headrace_models.config import read_config
from headrace_models.errors import UnsupportedArchitecture, UnsupportedFormat, WeightMismatch
from headrace_models.gguf_weights import read_gguf_tensors
from headrace_models.layers import Dense, Packed
from headrace_models.sources import resolve
from headrace_models.tensors import tensor_shapes
from headrace_models.weights import Checkpoint, WeightForm, open_checkpoint, read_folder_tensors

PLAIN = WeightForm(dtype=mx.float32, keep_packed=False)
KEPT = WeightForm(dtype=mx.float32, keep_packed=True)


@pytest.fixture
def shapes(tiny_llama):
    return tensor_shapes(read_config(resolve(tiny_llama)))


def test_a_whole_checkpoint_fits(tiny_llama, shapes):
    """A checkpoint that has every tensor in its shape passes, and taking empties it."""
    checkpoint = Checkpoint(read_folder_tensors(tiny_llama), PLAIN)
    checkpoint.check(shapes)
    for name in shapes:
        checkpoint.take_tensor(name)
    assert checkpoint.tensors == {}


def test_everything_that_does_not_fit_is_listed(tiny_llama, shapes):
    """One error names missing, unexpected and misshapen tensors together."""
    tensors = read_folder_tensors(tiny_llama)
    del tensors["model.norm.weight"]
    tensors["model.layers.7.mlp.up_proj.weight"] = mx.zeros((1, 1))
    tensors["model.embed_tokens.weight"] = mx.zeros((5, 32))
    with pytest.raises(WeightMismatch) as caught:
        Checkpoint(tensors).check(shapes)
    message = str(caught.value)
    assert "missing: model.norm.weight" in message
    assert "unexpected: model.layers.7.mlp.up_proj.weight" in message
    assert "misshapen: model.embed_tokens.weight (5, 32) instead of (320, 32)" in message


def test_known_leftovers_are_ignored(tiny_llama, shapes):
    """Rotary tables of old checkpoints and a copy of a tied head are no error."""
    tensors = read_folder_tensors(tiny_llama)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = mx.zeros(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    Checkpoint(tensors).check(shapes)


def test_a_missing_head_is_an_error_unless_tied(tiny_llama, shapes):
    """An untied model without lm_head must not silently use the embedding."""
    with pytest.raises(WeightMismatch, match=r"missing: lm_head\.weight"):
        Checkpoint(read_folder_tensors(tiny_llama)).check({**shapes, "lm_head.weight": (320, 32)})


def test_shards_equal_one_file(tiny_llama, tmp_path):
    """Two shards, with an index or without one, hold what one file holds."""
    whole = read_folder_tensors(tiny_llama)
    names = sorted(whole)
    halves = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, part in halves.items():
        mx.save_safetensors(str(tmp_path / file), {name: whole[name] for name in part})
    without_index = read_folder_tensors(tmp_path)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "stray.safetensors").write_bytes(b"not named by the index")
    with_index = read_folder_tensors(tmp_path)
    for tensors in (without_index, with_index):
        assert sorted(tensors) == names
        assert all(mx.array_equal(tensors[name], whole[name]).item() for name in names)


def test_a_damaged_file_is_refused(tmp_path):
    """Bytes that are no safetensors file are an error that names it."""
    (tmp_path / "model.safetensors").write_bytes(b"x" * 64)
    with pytest.raises(UnsupportedFormat, match=r"model\.safetensors"):
        read_folder_tensors(tmp_path)


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 64), (3, 32), (6, 64)])
def test_bits_follow_from_the_shapes(bits, group_size):
    """Per-layer quantization needs no table: shapes tell bits and group size of every matrix."""
    matrix = mx.random.normal((16, 128), key=mx.random.key(0))
    codes, scales, offsets = mx.quantize(matrix, group_size=group_size, bits=bits)
    for form in (KEPT, PLAIN):
        checkpoint = Checkpoint({"a.weight": codes, "a.scales": scales, "a.biases": offsets}, form)
        checkpoint.check({"a.weight": (16, 128)})
        weight = checkpoint.take_matrix("a")
        if form is KEPT:
            assert isinstance(weight, Packed)
            assert weight.layout == (bits, group_size, "affine")
        else:
            assert isinstance(weight, Dense)
            assert mx.array_equal(weight.matrix, mx.dequantize(codes, scales, offsets, group_size, bits)).item()
        assert checkpoint.tensors == {}


def test_mxfp4_matrices_are_recognised():
    """Microscaled weights have byte scales and no biases."""
    codes, scales = mx.quantize(mx.random.normal((16, 64), key=mx.random.key(0)), mode="mxfp4")
    checkpoint = Checkpoint({"a.weight": codes, "a.scales": scales}, KEPT)
    checkpoint.check({"a.weight": (16, 64)})
    weight = checkpoint.take_matrix("a")
    assert isinstance(weight, Packed)
    assert weight.layout == (4, 32, "mxfp4")


def test_unknown_packings_are_refused():
    """Packed weights that no mode explains are an error that says what was seen."""
    checkpoint = Checkpoint({"a.weight": mx.zeros((16, 8), mx.uint32), "a.scales": mx.ones((16, 2))}, KEPT)
    checkpoint.check({"a.weight": (16, 64)})
    with pytest.raises(UnsupportedFormat, match="4-bit"):
        checkpoint.take_matrix("a")


NUM_HEADS, NUM_KV_HEADS, WIDTH, MIDDLE, VOCABULARY = 4, 2, 256, 512, 64


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows, as its converter writes it."""
    return rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def encode(values: np.ndarray, kind: GGMLQuantizationType, random: np.random.Generator) -> np.ndarray:
    """Rows of a type; for K-quants, which only llama.cpp can make, random codes under a small block scale."""
    scale_at = {
        GGMLQuantizationType.Q4_K: (0, 2),
        GGMLQuantizationType.Q5_K: (0, 2),
        GGMLQuantizationType.Q6_K: (208,),
    }.get(kind)
    if scale_at is None:
        return quants.quantize(values, kind)
    num_elements, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (values.size // num_elements, num_bytes), dtype=np.uint8)
    for position in scale_at:
        blocks[:, position : position + 2] = np.array([0.001], dtype=np.float16).view(np.uint8)
    return blocks.reshape(values.shape[0], -1)


def write_gguf(path, kind: GGMLQuantizationType) -> dict[str, np.ndarray]:
    """Write a one-layer llama whose matrices are of one type; return the values stored, by Hugging Face name."""
    random = np.random.default_rng(0)
    kv_rows = WIDTH * NUM_KV_HEADS // NUM_HEADS
    table = {
        "token_embd": ("model.embed_tokens", (VOCABULARY, WIDTH)),
        "blk.0.attn_q": ("model.layers.0.self_attn.q_proj", (WIDTH, WIDTH)),
        "blk.0.attn_k": ("model.layers.0.self_attn.k_proj", (kv_rows, WIDTH)),
        "blk.0.attn_v": ("model.layers.0.self_attn.v_proj", (kv_rows, WIDTH)),
        "blk.0.attn_output": ("model.layers.0.self_attn.o_proj", (WIDTH, WIDTH)),
        "blk.0.ffn_gate": ("model.layers.0.mlp.gate_proj", (MIDDLE, WIDTH)),
        "blk.0.ffn_up": ("model.layers.0.mlp.up_proj", (MIDDLE, WIDTH)),
        "blk.0.ffn_down": ("model.layers.0.mlp.down_proj", (WIDTH, MIDDLE)),
    }
    writer = GGUFWriter(str(path), "llama")
    stored: dict[str, np.ndarray] = {}
    for name, (target, shape) in table.items():
        blocks = encode(random.standard_normal(shape, dtype=np.float32), kind, random)
        stored[f"{target}.weight"] = quants.dequantize(blocks, kind).reshape(shape)
        heads = {"blk.0.attn_q": NUM_HEADS, "blk.0.attn_k": NUM_KV_HEADS}.get(name)
        writer.add_tensor(f"{name}.weight", blocks if heads is None else permuted(blocks, heads), raw_dtype=kind)
    for name, target in (("output_norm", "model.norm"), ("blk.0.attn_norm", "model.layers.0.input_layernorm")):
        stored[f"{target}.weight"] = random.standard_normal(WIDTH, dtype=np.float32)
        writer.add_tensor(f"{name}.weight", stored[f"{target}.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_gguf_weights_equal_what_was_stored(tmp_path, kind):
    """Whatever the type and however it is read, names, row order and values are those of the original model."""
    path = tmp_path / "model.gguf"
    stored = write_gguf(path, GGMLQuantizationType[kind])
    checkpoint = Checkpoint(
        read_gguf_tensors(path, model_type="llama", num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS), PLAIN
    )
    assert checkpoint.is_packed == (kind in ("Q4_0", "Q4_1", "Q8_0"))
    checkpoint.check({name: values.shape for name, values in stored.items()})
    for name, values in stored.items():
        # MLX folds a block's zero point into a float16 offset, which costs up to one rounding of it.
        assert np.abs(np.array(checkpoint.take_tensor(name)) - values).max() < 5e-3, name


def test_gguf_of_gemma_3_takes_hugging_face_conventions(tmp_path):
    """Norms lose the 1 that llama.cpp adds, the four norms of a layer find their names, and rows keep their order."""
    path, random = tmp_path / "model.gguf", np.random.default_rng(0)
    prefix = "model.layers.0."
    norms = {
        "attn_norm": f"{prefix}input_layernorm",
        "post_attention_norm": f"{prefix}post_attention_layernorm",
        "ffn_norm": f"{prefix}pre_feedforward_layernorm",
        "post_ffw_norm": f"{prefix}post_feedforward_layernorm",
        "attn_q_norm": f"{prefix}self_attn.q_norm",
        "attn_k_norm": f"{prefix}self_attn.k_norm",
    }
    stored = {name: random.standard_normal(32, dtype=np.float32) for name in norms}
    queries = random.standard_normal((64, 32), dtype=np.float32)
    writer = GGUFWriter(str(path), "gemma3")
    for name, values in stored.items():
        writer.add_tensor(f"blk.0.{name}.weight", values + 1)
    writer.add_tensor("output_norm.weight", stored["attn_norm"] + 1)
    writer.add_tensor("blk.0.attn_q.weight", queries)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf_tensors(path, model_type="gemma3_text", num_heads=2, num_kv_heads=2)
    expected = {f"{target}.weight": stored[name] for name, target in norms.items()}
    expected |= {"model.norm.weight": stored["attn_norm"], f"{prefix}self_attn.q_proj.weight": queries}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.abs(np.array(found[name]) - values).max() < 1e-6, name


def test_gguf_of_other_families_is_refused_by_name(tmp_path):
    """The message names the type and the families whose files are read."""
    with pytest.raises(UnsupportedArchitecture, match=r"'gemma4_text'.*gemma3_text, .*llama"):
        read_gguf_tensors(tmp_path / "model.gguf", model_type="gemma4_text", num_heads=2, num_kv_heads=2)


def test_the_starter_model_is_packed_and_complete(smollm2):
    """The Q4_1 file gives every tensor of its configuration as packed matrices."""
    config = read_config(smollm2)
    checkpoint = open_checkpoint(smollm2, config)
    checkpoint.form = KEPT
    checkpoint.check(tensor_shapes(config))
    query, embedding = (
        checkpoint.take_matrix(name) for name in ("model.layers.0.self_attn.q_proj", "model.embed_tokens")
    )
    assert isinstance(query, Packed)
    assert isinstance(embedding, Packed)
    assert (query.layout, embedding.layout) == ((4, 32, "affine"), (8, 32, "affine"))
