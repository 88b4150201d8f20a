"""Conversion by blocks of rows: the same numbers as in one go, and hardly more memory than the result."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants

from headrace_models import load, row_blocks
from headrace_models.layers import Packed
from headrace_models.row_blocks import StoredTensor, join_blocks

PEAK_RATIO = 1.25
VOCABULARY, WIDTH = 40_000, 64


@pytest.mark.parametrize(("bits", "mode"), [(2, "affine"), (3, "affine"), (4, "affine"), (8, "affine"), (4, "mxfp4")])
@pytest.mark.parametrize("num_rows", [1, 7, 8, 9])
def test_blocks_do_not_show(monkeypatch, bits, mode, num_rows):
    """Dequantized in blocks of four rows or at once, whole blocks or not: equal bit for bit."""
    matrix = mx.random.normal((num_rows, 64), key=mx.random.key(0))
    codes, scales, *offsets = mx.quantize(matrix, group_size=32, bits=bits, mode=mode)
    packed = Packed(codes, scales, offsets[0] if offsets else None, bits, 32, mode)
    whole = packed.dequantize(mx.bfloat16)
    monkeypatch.setattr(row_blocks, "_BLOCK_ELEMENTS", 4 * 64)
    assert mx.array_equal(packed.dequantize(mx.bfloat16), whole).item()
    expected = mx.dequantize(codes, scales, *offsets, group_size=32, bits=bits, mode=mode)
    assert mx.allclose(whole.astype(mx.float32), expected, atol=2e-2).item()


def test_blocks_are_joined_in_order():
    """Each row is where it was, in the wanted dtype."""
    rows = mx.arange(14).reshape(7, 2)
    found = join_blocks((7, 2), mx.float16, [rows[:3], rows[3:6], rows[6:]])
    assert found.dtype == mx.float16
    assert mx.array_equal(found, rows).item()


def test_a_stored_tensor_is_finished_before_it_is_rounded():
    """What turns it into Hugging Face's convention works on float32: 1 + w less 1 keeps w's precision."""
    gains = mx.array([1.0001, 0.9999])
    stored = StoredTensor(shape=(2,), blocks=lambda: [gains[:1], gains[1:]], finish=lambda whole: whole - 1)
    assert mx.array_equal(stored.read(mx.bfloat16), (gains - 1).astype(mx.bfloat16)).item()
    assert (stored.size, stored.dtype) == (2, mx.float32)


def folder_of(tmp_path, tiny_llama, bits):
    """The tiny llama with a vocabulary that is most of it, in bfloat16 or packed."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": VOCABULARY}
    tensors = mx.load(str(folder / "model.safetensors"))
    # Copies, because the file below replaces the one that lazy arrays read.
    tensors = {name: mx.array(np.array(tensor)).astype(mx.bfloat16) for name, tensor in tensors.items()}
    embedding = mx.random.normal((VOCABULARY, config["hidden_size"]), dtype=mx.bfloat16, key=mx.random.key(1))
    if bits is None:
        tensors["model.embed_tokens.weight"] = embedding
    else:
        parts = mx.quantize(embedding, group_size=32, bits=bits)
        names = ("weight", "scales", "biases")
        tensors |= {f"model.embed_tokens.{name}": part for name, part in zip(names, parts, strict=True)}
        config["quantization"] = {"bits": bits, "group_size": 32}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("bits", [2, 4])
def test_dequantizing_takes_little_more_than_the_result(tmp_path, tiny_llama, monkeypatch, bits):
    """Peak memory of a load is at most 1.25 times what stays, though the embedding is nearly all of the model."""
    monkeypatch.setattr(row_blocks, "_BLOCK_ELEMENTS", 2**14)
    folder = folder_of(tmp_path, tiny_llama, bits)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loaded = load(folder, dtype="float32")
    peak, final = mx.get_peak_memory() - before, mx.get_active_memory() - before
    assert final >= loaded.model.weights_bytes > VOCABULARY * 32 * 4
    assert peak <= PEAK_RATIO * final


def test_k_quants_are_decoded_when_they_are_taken(tmp_path, monkeypatch):
    """Opening decodes nothing, and taking needs little more than the result."""
    from headrace_models.gguf_weights import read_gguf_tensors

    monkeypatch.setattr(row_blocks, "_BLOCK_ELEMENTS", 2**14)
    values = np.random.default_rng(0).standard_normal((VOCABULARY, WIDTH), dtype=np.float32)
    blocks = quants.quantize(values, GGMLQuantizationType.Q5_0)
    writer = GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=GGMLQuantizationType.Q5_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    tensors = read_gguf_tensors(tmp_path / "model.gguf", model_type="llama", num_heads=2, num_kv_heads=2)
    assert mx.get_peak_memory() - before < 1000
    found = tensors["model.embed_tokens.weight"].read(mx.float32)
    assert mx.get_peak_memory() - before <= PEAK_RATIO * found.nbytes
    np.testing.assert_array_equal(np.array(found), quants.dequantize(blocks, GGMLQuantizationType.Q5_0))


def test_a_lone_block_is_the_whole():
    """It is cast, and nothing is written twice."""
    found = join_blocks((2, 3), mx.float32, iter([mx.full((2, 3), 1.5, dtype=mx.float16)]))
    assert found.dtype == mx.float32
    assert found.tolist() == [[1.5] * 3] * 2
