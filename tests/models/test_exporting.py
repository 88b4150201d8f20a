"""Export: a plain folder, whole or not at all, that is the same model."""

import json
import sys

import mlx.core as mx
import pytest

from headrace_models import export, load
from headrace_models.errors import SourceError


def test_the_exported_folder_is_the_same_model(tiny_llama, tmp_path):
    """Logits, tokens and template survive; the folder loads from its own files alone."""
    folder = export(tiny_llama, tmp_path / "out")
    before, after = load(tiny_llama), load(folder)
    ids = mx.array([[5, 77, 300]], dtype=mx.int32)
    found = [loaded.model.forward_hidden(ids, loaded.model.make_cache()) for loaded in (before, after)]
    assert mx.array_equal(*found).item()
    messages = [{"role": "user", "content": "weir"}]
    assert before.codec.prepare_chat(messages).ids == after.codec.prepare_chat(messages).ids
    assert before.config.eos_token_ids == after.config.eos_token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_all_weights_have_the_wanted_dtype(tiny_llama, tmp_path, dtype):
    """And config.json says so."""
    folder = export(tiny_llama, tmp_path / "new" / "out", dtype=dtype)
    tensors = mx.load(str(folder / "model.safetensors"))
    assert {str(tensor.dtype) for tensor in tensors.values()} == {f"mlx.core.{dtype}"}
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == dtype
    assert load(folder, dtype="checkpoint").representation == dtype


def test_an_empty_folder_is_filled_and_a_full_one_refused(tiny_llama, tmp_path):
    """Nobody's files are overwritten."""
    target = tmp_path / "out"
    target.mkdir()
    export(tiny_llama, target)
    with pytest.raises(SourceError, match="not an empty folder"):
        export(tiny_llama, target)
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(SourceError, match="not an empty folder"):
        export(tiny_llama, file)
    assert file.read_text() == "mine"


def test_a_failed_export_leaves_nothing(tiny_llama, tmp_path, monkeypatch):
    """Neither a half folder nor a temporary one."""

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(sys.modules["headrace_models.exporting"], "tokenizer_files", fail)
    with pytest.raises(OSError, match="disk full"):
        export(tiny_llama, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_os_error(tiny_llama, tmp_path, monkeypatch):
    """MLX's own error for a failed write becomes one that tells what to do, and nothing is left behind."""

    def fail(*_args, **_options):
        raise RuntimeError("[write] Unable to write 5 bytes to file.")

    monkeypatch.setattr(mx, "save_safetensors", fail)
    with pytest.raises(OSError, match="free space"):
        export(tiny_llama, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_unknown_dtype_is_refused(tiny_llama, tmp_path):
    """By name, before anything is written."""
    with pytest.raises(ValueError, match="int8"):
        export(tiny_llama, tmp_path / "out", dtype="int8")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_readable_like_any_other(tiny_llama, tmp_path):
    """The mode of the temporary folder does not stick."""
    plain = tmp_path / "plain"
    plain.mkdir()
    assert export(tiny_llama, tmp_path / "out").stat().st_mode == plain.stat().st_mode
