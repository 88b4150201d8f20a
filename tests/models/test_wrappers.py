"""Text models inside others: their settings, their tensors under both orders of names, and what is left out."""

import json
import logging
import shutil

import mlx.core as mx
import pytest

from headrace_models import load, read_config
from headrace_models.errors import SourceError, WeightMismatch
from headrace_models.fields import Fields
from headrace_models.headers import read_headers
from headrace_models.sources import ModelSource
from headrace_models.wrappers import part_names, text_fields, text_name

# As the file of gemma-3-4b-it has it: what is usual is left out.
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 320,
    "sliding_window": 8,
}
TOWERS = {"vision_tower.layers.0.weight": 2, "vision_tower.norm.weight": 1, "multi_modal_projector.weight": 1}


def source_of(folder) -> ModelSource:
    return ModelSource(name="m", path=folder, format="folder")


def test_released_gemma_3_says_only_what_is_unusual(tmp_path):
    """Sizes, ropes and end tokens of gemma-3-4b-it come from its file and from what such files leave out."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3_4B))
    config = read_config(source_of(tmp_path))
    assert (config.model_type, config.dtype) == ("gemma3_text", "bfloat16")
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_positions, config.rope_theta) == (262_208, 131_072, 1e6)
    assert config.rope_scaling["factor"] == 8.0
    assert config.eos_token_ids == {1, 106}
    assert config.tie_word_embeddings
    assert "vision_config" not in config.raw


def test_settings_of_both_levels_are_joined():
    """The text model's own win, except for end tokens, which are a union; packed paths lose their part."""
    settings = {
        "model_type": "gemma4",
        "vocab_size": 7,
        "eos_token_id": 106,
        "dtype": "bfloat16",
        "quantization": {"bits": 4, "language_model.model.layers.0.mlp.up_proj": {"bits": 8}, "vision_tower.x": False},
        "text_config": {"eos_token_id": [1], "vocab_size": 9, "dtype": "float32", "head_dim": None, "model_type": "x"},
    }
    found = text_fields(Fields(settings, origin="a file")).values
    assert found["model_type"] == "gemma4_text"
    assert (found["vocab_size"], found["dtype"], found["eos_token_id"]) == (9, "float32", [1, 106])
    assert found["quantization"] == {"bits": 4, "model.layers.0.mlp.up_proj": {"bits": 8}}
    assert "head_dim" not in found
    plain = Fields({"model_type": "llama", "text_config": {}}, origin="a file")
    assert text_fields(plain) is plain
    with pytest.raises(SourceError, match=r"a file has no 'text_config'"):
        text_fields(Fields({"model_type": "gemma3"}, origin="a file"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("language_model.lm_head", "lm_head"),
        ("model.layers.0.mlp.up_proj.weight", None),
        ("language_model.other.weight", None),
        ("lm_head.weight", None),
    ],
)
def test_names_of_the_text_model(name, expected):
    """Both orders lead to the name that the text model alone would have."""
    assert text_name(name) == expected


def test_parts_are_told_apart_only_beside_a_text_part():
    """Every tensor is the text model's, or counted by part; a text model alone has no parts to leave out."""
    names = ["language_model.model.norm.weight", "vision_tower.a", "model.vision_tower.b", "embed_audio.c", "odd.d"]
    found = part_names(names)
    assert found.text == {"model.norm.weight": names[0], "odd.d": "odd.d"}
    assert found.left_out == {"vision_tower": 2, "embed_audio": 1}
    plain = ["model.norm.weight", "vision_tower.a"]
    assert part_names(plain).text == dict(zip(plain, plain, strict=True))
    assert part_names(plain).left_out == {}


@pytest.fixture
def wrapped(tiny_llama, tmp_path):
    """Write a random gemma3 with towers, in one of both orders of names; return its folder."""

    def write(order: str, more: dict[str, mx.array] | None = None):
        folder = tmp_path / order
        shutil.copytree(tiny_llama, folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": TEXT}))
        shapes = {"embed_tokens": (320, 32), "norm": (32,)}
        for index in range(2):
            prefix = f"layers.{index}."
            norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
            shapes |= {f"{prefix}{name}_layernorm": (32,) for name in norms}
            shapes |= {f"{prefix}self_attn.{name}_norm": (8,) for name in "qk"}
            shapes |= {f"{prefix}self_attn.{name}_proj": (16, 32) for name in "kv"}
            shapes |= {f"{prefix}self_attn.{name}_proj": (32, 32) for name in "qo"}
            shapes |= {f"{prefix}mlp.{name}_proj": (64, 32) for name in ("gate", "up")}
            shapes |= {f"{prefix}mlp.down_proj": (32, 64)}
        keys = mx.random.split(mx.random.key(3), len(shapes))
        prefix = {"inner": "language_model.model.", "outer": "model.language_model."}[order]
        tensors = {
            f"{prefix}{name}.weight": mx.random.normal(shape, key=key) * 0.1
            for (name, shape), key in zip(shapes.items(), keys, strict=True)
        }
        tower_prefix = "model." if order == "outer" else ""
        tensors |= {tower_prefix + name: mx.zeros(size) for name, size in TOWERS.items()} | (more or {})
        mx.save_safetensors(str(folder / "model.safetensors"), tensors)
        return folder

    return write


def test_towers_are_left_out_and_reported(wrapped, caplog):
    """Both orders give one model; the load says which parts it leaves out, and so do headers."""
    logits = []
    for order in ("inner", "outer"):
        folder = wrapped(order)
        with caplog.at_level(logging.WARNING, "headrace_models"):
            loaded = load(folder, dtype="float32")
        assert loaded.left_out == {"vision_tower": 2, "multi_modal_projector": 1}
        assert "multi_modal_projector (1 tensors), vision_tower (2 tensors)" in caplog.text
        assert read_headers(source_of(folder)).left_out == loaded.left_out
        hidden = loaded.model.forward_hidden(mx.array([[5, 7, 300]]), loaded.model.make_cache())
        logits.append(loaded.model.logits_from_hidden(hidden))
        caplog.clear()
    assert mx.array_equal(*logits)


def test_what_belongs_to_no_known_part_is_an_error(wrapped):
    """Only towers are left out: anything else that no family reads is listed, as everywhere."""
    folder = wrapped("inner", {"language_model.model.layers.0.mlp.router.weight": mx.zeros(3)})
    with pytest.raises(WeightMismatch, match=r"unexpected: model\.layers\.0\.mlp\.router\.weight"):
        load(folder, dtype="float32")


def test_a_text_model_alone_leaves_nothing_out(tiny_llama, caplog):
    """No part, no warning."""
    with caplog.at_level(logging.WARNING, "headrace_models"):
        assert load(tiny_llama).left_out == {}
    assert not caplog.records
