"""Conversion: whole or not at all, refused before any work, in blocks, and the model that was asked for."""

import json
import shutil
import sys
from types import SimpleNamespace

import mlx.core as mx
import pytest

from headrace_models import convert, load, row_blocks
from headrace_models.cpu_layout import GateUpApart
from headrace_models.errors import SourceError
from headrace_models.layers import Packed, SplitLinear
from headrace_models.packing_plan import BitsRule

IDS = mx.array([[5, 77, 300]], dtype=mx.int32)


def logits(loaded):
    return loaded.model.logits_from_hidden(loaded.model.forward_hidden(IDS, loaded.model.make_cache()))


def test_the_folder_is_the_model_with_fewer_bits(tiny_llama, tmp_path):
    """At 8 bits logits hardly move; tokens, template and end tokens are the same."""
    folder = convert(tiny_llama, tmp_path / "out", bits=8, group_size=32)
    before, after = load(tiny_llama, dtype="checkpoint"), load(folder, dtype="checkpoint")
    assert after.representation == "8-bit, group 32, float32"
    assert after.model.weights_bytes < before.model.weights_bytes / 2
    error = mx.sqrt(mx.mean((logits(after) - logits(before)) ** 2) / mx.mean(logits(before) ** 2)).item()
    assert 0 < error < 0.02
    messages = [{"role": "user", "content": "weir"}]
    assert before.codec.prepare_chat(messages).ids == after.codec.prepare_chat(messages).ids
    assert before.config.eos_token_ids == after.config.eos_token_ids


def _gate_and_up(gate_up):
    """On a CPU nothing packed is stacked; elsewhere parts of the same bits are one product."""
    if isinstance(gate_up, GateUpApart):
        return gate_up.gate, gate_up.up
    return gate_up.parts if isinstance(gate_up, SplitLinear) else (gate_up, gate_up)


def _bits(part):
    return part.weight.bits if isinstance(part.weight, Packed) else None


def test_mixed_bits_are_written_and_not_fused(tiny_llama, tmp_path):
    """Parts of one product with different bits, or none, stay apart; config.json tells each difference."""
    rules = [
        BitsRule(pattern="*.v_proj", bits=8),
        BitsRule(pattern="*.1.mlp.up_proj", bits=None),
        BitsRule(pattern="model.embed_tokens", bits=6),
    ]
    folder = convert(tiny_llama, tmp_path / "out", bits=4, group_size=32, rules=rules)
    settings = json.loads((folder / "config.json").read_text())
    expected = {"group_size": 32, "bits": 4, "mode": "affine", "model.layers.1.mlp.up_proj": False}
    expected |= {
        path: {"group_size": 32, "bits": bits, "mode": "affine"}
        for path, bits in {
            "model.embed_tokens": 6,
            "model.layers.0.self_attn.v_proj": 8,
            "model.layers.1.self_attn.v_proj": 8,
        }.items()
    }
    assert settings["quantization"] == settings["quantization_config"] == expected
    loaded = load(folder, dtype="checkpoint")
    first, second = loaded.model.layers
    assert loaded.representation == "4-bit and others, group 32, float32"
    assert [part.weight.bits for part in first.attention.qkv.parts] == [4, 4, 8]
    assert [_bits(part) for part in _gate_and_up(first.feed_forward.gate_up)] == [4, 4]
    assert [_bits(part) for part in _gate_and_up(second.feed_forward.gate_up)] == [4, None]
    assert mx.allclose(logits(loaded), logits(load(folder, dtype="float32")), atol=1e-4).item()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_is_that_of_scales_and_vectors(tiny_llama, tmp_path, dtype):
    """And config.json says so."""
    folder = convert(tiny_llama, tmp_path / "out", group_size=32, dtype=dtype)
    tensors = mx.load(str(folder / "model.safetensors"))
    assert {tensor.dtype for tensor in tensors.values()} == {mx.uint32, getattr(mx, dtype)}
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == dtype


def test_blocks_and_shards_do_not_show(tiny_llama, tmp_path, monkeypatch):
    """However small the blocks and files are, the tensors are equal, and an index names each file."""
    whole = convert(tiny_llama, tmp_path / "whole", group_size=32)
    monkeypatch.setattr(row_blocks, "_BLOCK_ELEMENTS", 100)
    monkeypatch.setattr(sys.modules["headrace_models.converting"], "_SHARD_BYTES", 4000)
    parts = convert(tiny_llama, tmp_path / "parts", group_size=32)
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in parts.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    expected = mx.load(str(whole / "model.safetensors"))
    found = {name: mx.load(str(parts / file))[name] for name, file in index["weight_map"].items()}
    assert found.keys() == expected.keys()
    assert all(mx.array_equal(found[name], tensor).item() for name, tensor in expected.items())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert mx.array_equal(logits(load(whole)), logits(load(parts))).item()


def test_progress_reaches_the_end(tiny_llama, tmp_path):
    """It grows with every tensor, up to the number of weights."""
    seen = []
    convert(tiny_llama, tmp_path / "out", group_size=32, on_progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (load(tiny_llama).model.weights_bytes // 4,) * 2


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 7},
        {"group_size": 48},
        {"dtype": "int8"},
        {"recipe": "mixed_9_9"},
        {"rules": [BitsRule(pattern="*.nothing", bits=4)]},
        {"rules": [BitsRule(pattern="*", bits=9)]},
        {"group_size": 128},
    ],
)
def test_nonsense_is_refused_before_any_work(tiny_llama, tmp_path, monkeypatch, options):
    """Before a folder is made or a weight is read; no row of the model is as long as 128."""
    monkeypatch.setattr(sys.modules["headrace_models.converting"], "_write_shards", None)
    with pytest.raises(ValueError, match=r"choose|Choose|there are"):
        convert(tiny_llama, tmp_path / "new" / "out", **({"group_size": 32} | options))
    assert list(tmp_path.iterdir()) == []


def test_nobodys_files_are_overwritten(tiny_llama, tmp_path):
    """A folder that is not empty is refused."""
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(SourceError, match="not an empty folder"):
        convert(tiny_llama, tmp_path, group_size=32)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_disk_that_is_too_small_is_known_before_writing(tiny_llama, tmp_path, monkeypatch):
    """The message says how much is needed, and nothing is left behind."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=10, used=9, free=1))
    with pytest.raises(OSError, match="are needed"):
        convert(tiny_llama, tmp_path / "out", group_size=32)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing(tiny_llama, tmp_path, monkeypatch):
    """Also when the first file is written already."""
    monkeypatch.setattr(sys.modules["headrace_models.converting"], "_SHARD_BYTES", 4000)
    save, calls = mx.save_safetensors, []

    def fail_later(*args, **options):
        calls.append(args)
        if len(calls) > 1:
            raise RuntimeError("[write] Unable to write 5 bytes to file.")
        save(*args, **options)

    monkeypatch.setattr(mx, "save_safetensors", fail_later)
    with pytest.raises(OSError, match="free space"):
        convert(tiny_llama, tmp_path / "out", group_size=32)
    assert len(calls) == 2
    assert list(tmp_path.iterdir()) == []
