"""Configurations: both forms give the same facts, end tokens are a union, and each bad field is named."""

import json

import gguf
import numpy as np
import pytest

from headrace_models.config import read_config
from headrace_models.errors import SourceError, UnsupportedFormat
from headrace_models.plan import make_plan
from headrace_models.sources import ModelSource
from headrace_models.tokenizer import read_tokenizer

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def folder_source(folder, config=None, **files):
    (folder / "config.json").write_text(json.dumps(LLAMA if config is None else config))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return ModelSource(name="m", path=folder, format="folder")


def test_end_tokens_are_the_union_of_three_files(tmp_path):
    """config.json, generation_config.json and the tokenizer each add their end tokens."""
    source = folder_source(
        tmp_path,
        generation_config={"eos_token_id": [3, 4]},
        tokenizer_config={"eos_token": {"content": "<e>"}, "added_tokens_decoder": {"5": {"content": "<e>"}}},
    )
    assert read_config(source).eos_token_ids == {2, 3, 4, 5}


def test_both_rope_forms_say_the_same(tmp_path):
    """`rope_theta` with `rope_scaling` equals the newer `rope_parameters`; the default kind is no scaling."""
    scaling = {"rope_type": "llama3", "factor": 8.0}
    old = read_config(folder_source(tmp_path, LLAMA | {"rope_scaling": scaling}))
    new = LLAMA | {"rope_parameters": scaling | {"rope_theta": 100000.0}}
    del new["rope_theta"]
    new = read_config(folder_source(tmp_path, new))
    assert old.rope_theta == new.rope_theta == 100000.0
    assert old.rope_scaling["factor"] == new.rope_scaling["factor"] == 8.0
    plain = LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    assert read_config(folder_source(tmp_path, plain)).rope_scaling is None


TEXTS, REALS = {"model_type", "torch_dtype"}, {"rms_norm_eps", "rope_theta"}
BROKEN = [
    (name, value)
    for name in LLAMA
    for value in ({}, "hot", -1.5, float("nan"))
    if not (name in TEXTS and isinstance(value, str)) and not (name in REALS and value == -1.5)
]


@pytest.mark.parametrize(("name", "value"), BROKEN)
def test_an_ill_typed_field_is_named_with_its_value(tmp_path, name, value):
    """Whatever field is broken, the error names it, its value and the file."""
    with pytest.raises(SourceError, match=r"config\.json") as caught:
        read_config(folder_source(tmp_path, LLAMA | {name: value}))
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


def test_a_missing_field_is_named(tmp_path):
    """A size that has no default is an error that names it."""
    with pytest.raises(SourceError, match="no 'hidden_size'"):
        read_config(folder_source(tmp_path, {name: value for name, value in LLAMA.items() if name != "hidden_size"}))


def test_sizes_that_contradict_each_other_are_refused(tmp_path):
    """Heads that do not divide, and end tokens outside the vocabulary, are errors, not wrong output later."""
    with pytest.raises(SourceError, match="num_key_value_heads"):
        read_config(folder_source(tmp_path, LLAMA | {"num_key_value_heads": 3}))
    with pytest.raises(SourceError, match="no multiple"):
        read_config(folder_source(tmp_path, LLAMA | {"hidden_size": 33}))
    with pytest.raises(SourceError, match="outside the vocabulary"):
        read_config(folder_source(tmp_path, LLAMA | {"eos_token_id": 100}))


def test_quantization_of_an_mlx_folder(tmp_path):
    """Overrides by module keep what they do not say; false means that the module is plain."""
    block = {"bits": 4, "group_size": 64, "model.embed_tokens": {"bits": 8}, "lm_head": False}
    found = read_config(folder_source(tmp_path, LLAMA | {"quantization": block})).quantization
    assert (found.bits, found.group_size, found.mode) == (4, 64, "affine")
    assert (found.overrides["model.embed_tokens"].bits, found.overrides["model.embed_tokens"].group_size) == (8, 64)
    assert found.overrides["lm_head"] is None


def test_foreign_quantization_is_refused_by_name(tmp_path):
    """Weights packed for other libraries are refused by the name of their method."""
    with pytest.raises(UnsupportedFormat, match="'gptq'"):
        read_config(folder_source(tmp_path, LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))


def test_generation_defaults(tmp_path):
    """What the authors say is kept, what they do not say is None, and greedy is temperature 0."""
    found = read_config(folder_source(tmp_path, generation_config={"temperature": 0.6, "top_k": 0})).generation
    assert (found.temperature, found.top_k, found.top_p) == (0.6, 0, None)
    assert read_config(folder_source(tmp_path, generation_config={"do_sample": False})).generation.temperature == 0.0
    with pytest.raises(SourceError, match=r"'top_p' of .*generation_config"):
        read_config(folder_source(tmp_path, generation_config={"top_p": "much"}))


@pytest.mark.parametrize(("num_layers", "scalar"), [(18, 64), (62, 8)])
def test_gguf_of_gemma_3_gets_what_all_gemma_3_models_agree_on(tmp_path, num_layers, scalar):
    """llama.cpp writes neither the local rope base nor the pattern of windows; the largest model scales otherwise."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_vocab_size(100)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(num_layers)
    writer.add_head_count(4)
    writer.add_key_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_context_length(256)
    writer.add_sliding_window(16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = read_config(ModelSource(name="m", path=path, format="gguf"))
    plan = make_plan(config)
    assert (config.model_type, config.head_dim, config.tie_word_embeddings) == ("gemma3_text", 64, True)
    assert plan.attention_scale == scalar**-0.5
    assert plan.windows[:6] == (16, 16, 16, 16, 16, None)
    assert [rope.base for rope in plan.ropes] == [1e6, 1e4]
    assert plan.activation == "gelu_tanh"


def test_gguf_keys_become_the_folders_fields(tmp_path):
    """A GGUF file and the folder it was made from give equal sizes, end tokens and sampling settings."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(100)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_context_length(256)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_config(ModelSource(name="m", path=path, format="gguf"))
    expected = read_config(folder_source(tmp_path))
    for name in ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"):
        assert getattr(found, name) == getattr(expected, name), name
    for name in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta", "max_positions"):
        assert getattr(found, name) == getattr(expected, name), name
    assert (found.eos_token_ids, found.tie_word_embeddings, found.bos_token_id) == ({2}, True, 1)
    assert found.generation.temperature == 0.6


@pytest.mark.parametrize("is_added", [True, False])
def test_an_end_token_is_found_without_reading_the_vocabulary(tmp_path, tiny_llama, monkeypatch, is_added):
    """Among the added tokens, whatever text comes before them; the whole tokenizer is read for any other token."""
    text = (tiny_llama / "tokenizer.json").read_text()
    assert '"<|im_end|>"' in text
    quoted = json.dumps('"id": 5, "content": "<|im_end|>", ')
    (tmp_path / "tokenizer.json").write_text(f'{{"x": {quoted}, ' + text.lstrip()[1:])
    token = "<|im_end|>" if is_added else "a"
    read = []
    monkeypatch.setattr("headrace_models.config.read_tokenizer", lambda path: read.append(path) or Known())
    source = folder_source(tmp_path, tokenizer_config={"eos_token": token})
    expected = read_tokenizer(tiny_llama / "tokenizer.json").token_to_id(token)
    assert read_config(source).eos_token_ids == {2, expected if is_added else 77}
    assert bool(read) != is_added


class Known:
    def token_to_id(self, _token: str) -> int:
        return 77
