"""Dense models: caches, chunks and batches change nothing, and what cannot run is refused."""

import json
import shutil

import mlx.core as mx
import pytest
from attrs import evolve

from headrace_kvcache import KVCache, RowBatch
from headrace_models.building import build_dense
from headrace_models.config import read_config
from headrace_models.errors import UnsupportedArchitecture, WeightMismatch
from headrace_models.sources import resolve
from headrace_models.tensors import tensor_shapes
from headrace_models.weights import Checkpoint, WeightForm, open_checkpoint, read_folder_tensors

# Float32 sums in another order: the tolerance of design D6.
TOLERANCE = 1e-4
FORM = WeightForm(dtype=mx.float32, keep_packed=False)


def build(folder, *, on_gpu: bool = False):
    source = resolve(folder)
    config = read_config(source)
    checkpoint = open_checkpoint(source, config)
    checkpoint.form = FORM
    return build_dense(config, checkpoint, on_gpu=on_gpu)


@pytest.fixture(scope="module")
def model(tiny_llama):
    return build(tiny_llama)


def logits(model, ids: list[list[int]], caches=None) -> mx.array:
    caches = model.make_cache() if caches is None else caches
    return model.logits_from_hidden(model.forward_hidden(mx.array(ids, dtype=mx.int32), caches))


def distance(left: mx.array, right: mx.array) -> float:
    assert left.shape == right.shape
    return mx.abs(left - right).max().item()


def reference(tensors: dict[str, mx.array], config, ids: list[int]) -> mx.array:
    """A slow llama over one whole sequence, written from the formulas."""
    hidden = tensors["model.embed_tokens.weight"][mx.array(ids)]
    size, half = config.head_dim, config.head_dim // 2
    angles = mx.arange(len(ids))[:, None] * mx.array([config.rope_theta ** (-2 * i / size) for i in range(half)])

    def norm(x, name):
        return x / mx.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * tensors[f"{name}.weight"]

    def rotate(x):
        low, high = x[:, :half], x[:, half:]
        return mx.concatenate(
            [low * mx.cos(angles) - high * mx.sin(angles), high * mx.cos(angles) + low * mx.sin(angles)], axis=-1
        )

    visible = mx.arange(len(ids))[None] <= mx.arange(len(ids))[:, None]
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}."

        def project(x, name, prefix=prefix):
            return x @ tensors[f"{prefix}{name}.weight"].T

        x = norm(hidden, f"{prefix}input_layernorm")
        q, k, v = (project(x, f"self_attn.{name}_proj") for name in "qkv")
        heads = []
        for head in range(config.num_attention_heads):
            shared = head * config.num_key_value_heads // config.num_attention_heads
            mine, theirs = slice(head * size, (head + 1) * size), slice(shared * size, (shared + 1) * size)
            scores = rotate(q[:, mine]) @ rotate(k[:, theirs]).T * size**-0.5
            heads.append(mx.softmax(mx.where(visible, scores, -mx.inf), axis=-1) @ v[:, theirs])
        hidden = hidden + project(mx.concatenate(heads, axis=-1), "self_attn.o_proj")
        x = norm(hidden, f"{prefix}post_attention_layernorm")
        gate = project(x, "mlp.gate_proj")
        hidden = hidden + project(gate * mx.sigmoid(gate) * project(x, "mlp.up_proj"), "mlp.down_proj")
    return norm(hidden, "model.norm") @ tensors["model.embed_tokens.weight"].T


@pytest.mark.parametrize("on_gpu", [False, True])
def test_logits_equal_the_formulas(tiny_llama, on_gpu):
    """The forms for CPU and GPU both compute the architecture as written down, over a whole sequence."""
    ids = [5, 77, 300, 4, 4, 19, 200]
    model = build(tiny_llama, on_gpu=on_gpu)
    expected = reference(read_folder_tensors(tiny_llama), model.config, ids)
    assert distance(logits(model, [ids])[0], expected) < TOLERANCE


@pytest.mark.parametrize("sizes", [[7], [3, 4], [1] * 7, [5, 1, 1]])
def test_chunks_change_nothing(model, sizes):
    """Prefill in any slices, down to single tokens, gives the logits of one pass."""
    ids = [5, 77, 300, 4, 4, 19, 200]
    caches, parts, start = model.make_cache(), [], 0
    for size in sizes:
        parts.append(logits(model, [ids[start : start + size]], caches))
        start += size
    assert distance(mx.concatenate(parts, axis=1), logits(model, [ids])) < TOLERANCE
    assert [cache.offset for cache in caches] == [7] * len(caches)


def test_ragged_rows_equal_each_alone(model):
    """Rows of different lengths in slots, prefilled apart and decoded together, equal the rows alone."""
    prompts = [[5, 77, 300], [9], [4, 4, 19, 200, 31]]
    batch = RowBatch(len(model.layers), max_rows=4)
    slots = [batch.join() for _ in prompts]
    for slot, prompt in zip(slots, prompts, strict=True):
        mx.eval(logits(model, [prompt], batch.view([slot], len(prompt))))
        batch.advance([slot], len(prompt))
    for step in range(3):
        found = logits(model, [[50 + step]] * len(prompts), batch.view(slots, 1))
        mx.eval(found)
        batch.advance(slots, 1)
        for row, prompt in enumerate(prompts):
            alone = logits(model, [[*prompt, *range(50, 51 + step)]])[0, -1:]
            assert distance(found[row], alone) < TOLERANCE


def test_embeddings_are_what_ids_become(model):
    """`forward_embeddings` of the looked-up ids equals `forward_hidden` of the ids."""
    ids = mx.array([[5, 77, 300]], dtype=mx.int32)
    from_ids = model.forward_hidden(ids, model.make_cache())
    from_embeddings = model.forward_embeddings(model.embedding(ids), model.make_cache())
    assert distance(from_ids, from_embeddings) == 0


def test_fresh_caches_cost_nothing(model):
    """One plain cache per layer, without memory."""
    caches = model.make_cache()
    assert [type(cache) for cache in caches] == [KVCache] * model.config.num_hidden_layers
    assert sum(cache.nbytes for cache in caches) == 0


def test_weights_bytes_counts_each_weight_once(model):
    """A tied head adds nothing; fusing neither drops nor doubles a row."""
    shapes = tensor_shapes(model.config)
    num_weights = sum(rows * (columns[0] if columns else 1) for rows, *columns in shapes.values())
    assert model.weights_bytes == 4 * num_weights


def test_the_checkpoint_is_empty_after_building(tiny_llama):
    """Nothing that was loaded stays referenced beside the model."""
    source = resolve(tiny_llama)
    config = read_config(source)
    checkpoint = open_checkpoint(source, config)
    checkpoint.form = FORM
    build_dense(config, checkpoint, on_gpu=False)
    assert checkpoint.tensors == {}


@pytest.mark.parametrize("flags", [{"attention_bias": True}, {"mlp_bias": True}, {"tie_word_embeddings": False}])
def test_optional_tensors_take_part(tiny_llama, flags):
    """Biases and an untied head change the logits: they are used, not just accepted."""
    source = resolve(tiny_llama)
    config = read_config(source)
    variant = evolve(config, **flags)
    tensors = read_folder_tensors(tiny_llama)
    tensors |= {
        name: mx.random.normal(shape, key=mx.random.key(len(name)))
        for name, shape in tensor_shapes(variant).items()
        if name not in tensors
    }
    ids = [[5, 77, 300]]
    plain = logits(build(tiny_llama), ids)
    names = [name for name in tensor_shapes(variant) if name not in tensor_shapes(config)]
    for name in names:
        without = {**tensors, name: mx.zeros(tensors[name].shape)}
        found = logits(build_dense(variant, Checkpoint(dict(tensors), FORM), on_gpu=False), ids)
        lacking = logits(build_dense(variant, Checkpoint(without, FORM), on_gpu=False), ids)
        # A bias on keys shifts all scores of a query alike only where rope does not turn it.
        assert distance(found, lacking) > 1e-6, name
        assert distance(found, plain) > 1e-6


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_scaling"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ({"head_dim": 7}, "head_dim"),
    ],
)
def test_settings_that_would_change_the_answer_are_refused(tiny_llama, tmp_path, setting, named):
    """What the family does not compute is an error naming the field, never ignored."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | setting))
    with pytest.raises(UnsupportedArchitecture, match=named):
        build(folder)


def test_adapters_and_media_are_refused(model):
    """A plain text row has no context; what the family lacks is a ValueError."""
    assert model.row_context() is None
    assert model.batch_context([None, None]) is None
    for wanted in ({"adapters": ["a"]}, {"media": object()}):
        with pytest.raises(ValueError, match="takes no"):
            model.row_context(**wanted)


@pytest.mark.parametrize("num_layers", [1, 3, 10**9])
def test_the_number_of_layers_is_held_against_the_weights_first(tiny_llama, num_layers):
    """A configuration that promises other layers is refused before anything is made per layer, however many."""
    source = resolve(tiny_llama)
    config = evolve(read_config(source), num_hidden_layers=num_layers)
    with pytest.raises(WeightMismatch, match=f"num_hidden_layers is {num_layers}"):
        build_dense(config, open_checkpoint(source, config), on_gpu=False)
