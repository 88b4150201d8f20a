"""Plans: which layers see a window or have no rope, what scales what, and what is refused by name."""

import json

import pytest

from headrace_models.config import read_config
from headrace_models.errors import SourceError, UnsupportedArchitecture
from headrace_models.families import FAMILIES
from headrace_models.plan import make_plan
from headrace_models.sources import ModelSource

SIZES = {
    "vocab_size": 100,
    "hidden_size": 640,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
    "max_position_embeddings": 256,
}
SLIDING = ["sliding_attention", *["full_attention"] * 5]
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 8,
    "num_key_value_heads": 4,
    "global_head_dim": 64,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}


def plan_of(folder, model_type: str, **settings):
    (folder / "config.json").write_text(json.dumps({**SIZES, "model_type": model_type, **settings}))
    return make_plan(read_config(ModelSource(name="m", path=folder, format="folder")))


@pytest.mark.parametrize(
    ("model_type", "settings", "windows"),
    [
        ("llama", {"sliding_window": 8}, [None] * 6),
        ("llama", {"layer_types": SLIDING, "sliding_window": 8}, [8] + [None] * 5),
        ("mistral", {"sliding_window": 8}, [8] * 6),
        ("mistral", {"sliding_window": None}, [None] * 6),
        ("phi3", {"sliding_window": 8}, [8] * 6),
        ("starcoder2", {"sliding_window": 8}, [8] * 6),
        ("gemma2", {"sliding_window": 8}, [8, None] * 3),
        ("gemma3_text", {"sliding_window": 8}, [8] * 5 + [None]),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}, [8, None] * 3),
        ("gemma3_text", {"sliding_window": 8, "_sliding_window_pattern": 3}, [8, 8, None] * 2),
        ("gemma3_text", {"layer_types": SLIDING, "sliding_window": 8}, [8] + [None] * 5),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False}, [None] * 6),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4}, [None] * 4 + [8] * 2),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, [8] * 6),
        ("granite", {"sliding_window": 8}, [None] * 6),
    ],
)
def test_windows_follow_the_checkpoint_then_the_family(tmp_path, model_type, settings, windows):
    """`layer_types` wins; without it the family's rule decides."""
    assert list(plan_of(tmp_path, model_type, **settings).windows) == windows


def test_windowed_layers_of_gemma_3_have_a_rope_of_their_own(tmp_path):
    """Both spellings: one local base beside the global rope, or one entry for each kind of layer."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = plan_of(
        tmp_path, "gemma3_text", sliding_window=8, rope_theta=1e6, rope_local_base_freq=500.0, rope_scaling=scaling
    )
    kinds = {"full_attention": scaling | {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 500.0}}
    new = plan_of(tmp_path, "gemma3_text", sliding_window=8, rope_parameters=kinds)
    for plan in (old, new):
        assert plan.rope_indices == (1, 1, 1, 1, 1, 0)
        assert [rope.base for rope in plan.ropes] == [1e6, 500.0]
        assert plan.ropes[0].scaling["factor"] == 8.0
        assert plan.ropes[1].scaling is None


def test_layers_of_gemma_4_differ(tmp_path):
    """Heads and rope by kind; the last layers share keys and values with the last own layer of their kind."""
    plan = plan_of(tmp_path, "gemma4_text", **GEMMA4)
    assert [shape.head_dim for shape in plan.shapes] == [32, 64] * 3
    assert [shape.source for shape in plan.shapes] == [None, None, None, 1, 2, 1]
    assert [shape.intermediate_size for shape in plan.shapes] == [64] * 3 + [128] * 3
    assert [(rope.size, rope.base) for rope in plan.ropes] == [(64, 1e6), (32, 500.0)]
    assert plan.rope_indices == (1, 0) * 3
    assert plan.attention_scale == 1.0
    assert plan.per_layer.size == 16
    assert plan_of(tmp_path, "gemma4_text", **GEMMA4 | {"hidden_size_per_layer_input": 0}).per_layer is None


@pytest.mark.parametrize("name", ["num_kv_shared_layers", "hidden_size_per_layer_input", "use_double_wide_mlp"])
def test_sizes_of_gemma_4_have_no_default(tmp_path, name):
    """Programs differ about what stands for a missing one, so none is guessed."""
    with pytest.raises(SourceError, match=name):
        plan_of(tmp_path, "gemma4_text", **{key: GEMMA4[key] for key in GEMMA4 if key != name})


def test_layers_without_rope(tmp_path):
    """Every fourth layer, or those that the checkpoint lists with 0."""
    assert plan_of(tmp_path, "smollm3").rope_indices == (0, 0, 0, None, 0, 0)
    listed = plan_of(tmp_path, "smollm3", no_rope_layers=[0, 1, 1, 1, 1, 0])
    assert listed.rope_indices == (None, 0, 0, 0, 0, None)


def test_scales(tmp_path):
    """Each family scales by the settings that it declares, and by none of another family's."""
    gemma3 = plan_of(tmp_path, "gemma3_text", query_pre_attn_scalar=16, final_logit_softcapping=30.0)
    assert (gemma3.attention_scale, gemma3.logit_softcap, gemma3.attention_softcap) == (0.25, 30.0, None)
    assert gemma3.embedding_scale == 25.25
    assert plan_of(tmp_path, "gemma2").embedding_scale == pytest.approx(640**0.5)
    granite = plan_of(tmp_path, "granite", attention_multiplier=0.5, residual_multiplier=0.2, logits_scaling=8.0)
    assert (granite.attention_scale, granite.residual_scale, granite.logit_divisor) == (0.5, 0.2, 8.0)
    llama = plan_of(tmp_path, "llama", attention_multiplier=0.5, residual_multiplier=0.2, logits_scaling=8.0)
    assert (llama.attention_scale, llama.residual_scale, llama.logit_divisor) == (32**-0.5, None, None)


def test_a_context_at_the_top_level_reaches_the_scaled_rope(tmp_path):
    """Phi 3 has `original_max_position_embeddings` beside `rope_scaling`, not in it."""
    plan = plan_of(
        tmp_path,
        "phi3",
        original_max_position_embeddings=64,
        partial_rotary_factor=0.5,
        rope_scaling={"type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
    )
    assert plan.ropes[0].scaling["original_max_position_embeddings"] == 64
    assert plan.ropes[0].size == 16


@pytest.mark.parametrize(
    ("model_type", "settings", "named"),
    [
        ("mamba", {}, "'mamba'"),
        ("llama", {"hidden_act": "relu"}, "hidden_act"),
        ("gemma", {"hidden_activation": "relu"}, "hidden_activation"),
        ("llama", {"layer_types": ["full_attention"]}, "layer_types"),
        ("llama", {"layer_types": ["linear_attention"] * 6}, "layer_types"),
        ("granite", {"layer_types": SLIDING, "sliding_window": 8}, "layer_types"),
        ("glm4", {"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ("glm4", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("smollm3", {"no_rope_layers": [1, 2]}, "no_rope_layers"),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, "max_window_layers"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        ("gemma4_text", GEMMA4 | {"enable_moe_block": True}, "enable_moe_block"),
        ("gemma4_text", GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma4_text", {name: GEMMA4[name] for name in GEMMA4 if name != "rope_parameters"}, "rope_parameters"),
        ("gemma4_text", GEMMA4 | {"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ("gemma4_text", GEMMA4 | {"num_kv_shared_layers": 5}, "none of the first 1 layers"),
        (
            "gemma4_text",
            GEMMA4 | {"rope_parameters": GEMMA4["rope_parameters"] | {"sliding_attention": {"rope_type": "yarn"}}},
            "rope_type",
        ),
    ],
)
def test_what_no_family_computes_is_refused_by_name(tmp_path, model_type, settings, named):
    """The message names the setting, or the type and every family that runs."""
    with pytest.raises(UnsupportedArchitecture, match=named) as caught:
        plan_of(tmp_path, model_type, **settings)
    if model_type not in FAMILIES:
        assert all(name in str(caught.value) for name in FAMILIES)


def test_a_window_without_its_size_is_refused(tmp_path):
    """`layer_types` with windows needs `sliding_window`."""
    with pytest.raises(SourceError, match="sliding_window"):
        plan_of(tmp_path, "llama", layer_types=SLIDING)


def test_an_unknown_type_in_unknown_form_is_named_too(tmp_path):
    """A configuration with other names for its sizes is an unknown architecture, not an incomplete file."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 8}))
    with pytest.raises(UnsupportedArchitecture, match="'gpt2'"):
        read_config(ModelSource(name="m", path=tmp_path, format="folder"))
