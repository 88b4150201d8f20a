"""Loading: the device decides the form, `dtype` overrides it, and an identity tells models apart."""

import json
import os
import shutil
import sys
import threading
from functools import partial

import mlx.core as mx
import pytest

from headrace_models import load
from headrace_models.device import DeviceProfile
from headrace_models.errors import ModelError, SourceError, UnsupportedArchitecture, WeightMismatch
from headrace_models.loading import weights_fingerprint
from headrace_models.sources import resolve

IDS = [[5, 77, 300, 4]]


def logits(loaded) -> mx.array:
    ids = mx.array(IDS, dtype=mx.int32)
    return loaded.model.logits_from_hidden(loaded.model.forward_hidden(ids, loaded.model.make_cache()))


@pytest.fixture
def folder(tiny_llama, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(tiny_llama, copy)
    return copy


@pytest.fixture
def packed_folder(folder):
    """The tiny model quantized as MLX does, with the output projections at 8 bits."""
    tensors, packed = mx.load(str(folder / "model.safetensors")), {}
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            packed[name] = tensor.astype(mx.bfloat16)
            continue
        path = name.removesuffix(".weight")
        bits = 8 if "o_proj" in name else 4
        parts = mx.quantize(tensor.astype(mx.bfloat16), group_size=32, bits=bits)
        packed |= {f"{path}.{part}": value for part, value in zip(("weight", "scales", "biases"), parts, strict=True)}
    mx.save_safetensors(str(folder / "model.safetensors"), packed)
    config = json.loads((folder / "config.json").read_text())
    overrides = {f"model.layers.{index}.self_attn.o_proj": {"group_size": 32, "bits": 8} for index in range(2)}
    config["quantization"] = {"group_size": 32, "bits": 4, **overrides}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def on(monkeypatch, kind: str, memory_bytes: int = 2**40) -> None:
    """Pretend to be another device; everything still runs on this one."""
    profile = DeviceProfile(kind=kind, name="pretended", memory_bytes=memory_bytes, num_cpus=1)
    monkeypatch.setattr(sys.modules["headrace_models.loading"], "profile", lambda: profile)


def test_everything_of_a_model_is_loaded(tiny_llama):
    """A folder gives model, codec, configuration, identity and where it came from."""
    loaded = load(tiny_llama)
    assert loaded.config.model_type == "llama"
    assert loaded.codec.decode(loaded.codec.encode("river")) == "river"
    assert loaded.model.config is loaded.config
    assert loaded.source == resolve(tiny_llama)
    assert len(loaded.identity) == 64
    assert logits(loaded).shape == (1, 4, loaded.config.vocab_size)


def test_a_source_loads_like_its_name(tiny_llama):
    """`load` takes what `resolve` returned."""
    assert load(resolve(tiny_llama)).identity == load(str(tiny_llama)).identity


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float32", mx.float32), ("bfloat16", mx.bfloat16), ("float16", mx.float16)]
)
def test_an_explicit_dtype_is_the_dtype_of_all_weights(packed_folder, dtype, expected):
    """Also from a quantized checkpoint: nothing stays packed."""
    loaded = load(packed_folder, dtype=dtype)
    assert {array.dtype for array in loaded.model.arrays()} == {expected}
    assert loaded.representation == dtype


def test_a_cpu_dequantizes_what_fits(packed_folder, monkeypatch):
    """Design D13: on a CPU `auto` is float32, and the checkpoint's own form when that would not fit."""
    on(monkeypatch, "cpu")
    assert load(packed_folder).representation == "float32"
    on(monkeypatch, "cpu", memory_bytes=1000)
    small = load(packed_folder)
    assert small.representation == "4-bit and others, group 32, float32"
    assert mx.uint32 in {array.dtype for array in small.model.arrays()}


@pytest.mark.parametrize("kind", ["metal", "cuda"])
def test_a_gpu_keeps_the_checkpoint(packed_folder, monkeypatch, kind):
    """Packed matrices stay packed, and activations have the checkpoint's dtype."""
    on(monkeypatch, kind)
    loaded = load(packed_folder)
    assert {array.dtype for array in loaded.model.arrays()} == {mx.uint32, mx.bfloat16}
    assert logits(loaded).dtype == mx.bfloat16


def test_forms_agree(packed_folder):
    """Packed and dequantized weights are the same model; float32 sums differ by their order alone."""
    packed, plain = load(packed_folder, dtype="checkpoint"), load(packed_folder, dtype="float32")
    assert packed.model.weights_bytes < plain.model.weights_bytes / 3
    assert mx.abs(logits(packed) - logits(plain)).max().item() < 1e-4


def test_arrays_may_be_used_by_another_thread(tiny_llama):
    """Loading evaluates everything, because a lazy array belongs to the thread that made it."""
    loaded, failures = load(tiny_llama), []

    def use() -> None:
        try:
            mx.eval([array + 0 for array in loaded.model.arrays()])
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert failures == []


def test_identity_follows_weights_tokenizer_and_form(folder):
    """Equal files give the equal identity; one changed weight, template or dtype gives another."""
    seen = [load(folder).identity]
    assert load(folder).identity == seen[0]
    seen.append(load(folder, dtype="bfloat16").identity)
    tensors = mx.load(str(folder / "model.safetensors"))
    mx.eval(tensors)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    seen.append(load(folder).identity)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "{{ messages }}"}))
    seen.append(load(folder).identity)
    assert len(set(seen)) == len(seen)


def test_a_fingerprint_reads_samples_only(tmp_path):
    """A large sparse file is fingerprinted at once, and a change inside a sample is seen."""
    path = tmp_path / "big.gguf"
    with path.open("wb") as file:
        file.truncate(2**34)
    source = resolve(path)
    before = weights_fingerprint(source)
    with path.open("r+b") as file:
        file.seek(2**34 - 1)
        file.write(b"x")
    assert weights_fingerprint(source) != before


def test_a_change_between_the_samples_is_another_fingerprint(tmp_path):
    """A variant of the same size and samples is told apart by its file's time; the same file stays the same."""
    path = tmp_path / "big.gguf"
    with path.open("wb") as file:
        file.truncate(2**30)
    os.utime(path, ns=(1, 1_000_000_000))
    source = resolve(path)
    before = weights_fingerprint(source)
    assert weights_fingerprint(resolve(path)) == before
    with path.open("r+b") as file:
        file.seek(2**23)
        file.write(b"x")
    assert weights_fingerprint(source) != before


def test_what_cannot_run_is_refused_before_weights_are_read(folder):
    """Another architecture, another dtype and a name that leads nowhere are clear errors."""
    with pytest.raises(ValueError, match="float64"):
        load(folder, dtype="float64")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(UnsupportedArchitecture, match="mamba"):
        load(folder)
    with pytest.raises(SourceError):
        load(folder / "nowhere")


def test_a_checkpoint_of_another_model_is_refused(folder):
    """Weights that contradict config.json are listed, not broadcast."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(WeightMismatch, match=r"missing: model\.layers\.2"):
        load(folder)


def test_loading_is_what_an_engine_calls(tiny_llama):
    """`partial(load, NAME)` is a loader: it takes no arguments and returns everything an engine needs."""
    loaded = partial(load, str(tiny_llama), dtype="float32")()
    assert {"model", "codec", "identity", "device", "representation"} <= set(dir(loaded))
    assert issubclass(WeightMismatch, ModelError)


def test_the_starter_model_speaks(smollm2):
    """Real weights, real tokenizer: greedy decoding continues a fact."""
    loaded = load(smollm2)
    model, caches, out = loaded.model, loaded.model.make_cache(), []
    ids = mx.array([loaded.codec.encode("The capital of France is")], dtype=mx.int32)
    for _ in range(2):
        token = mx.argmax(model.logits_from_hidden(model.forward_hidden(ids, caches)[:, -1:])[:, -1], axis=-1)
        out += token.tolist()
        ids = token[:, None]
    assert loaded.codec.decode(out) == " Paris."
