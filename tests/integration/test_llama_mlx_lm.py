"""The llama family against mlx-lm's own class on the same files: an oracle that nobody here wrote."""

import json
import shutil

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache as OracleCache
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from headrace_kvcache import RowBatch
from headrace_models import export, load

FLOAT32_TOLERANCE = 1e-4
# Both sum in bfloat16, in another order: a few units in the last place of logits of magnitude 4 (2**-6 each).
BFLOAT16_TOLERANCE = 0.1

PROMPTS = [[5, 77, 300, 4, 4, 19], [9], [200, 31, 8]]

BASE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "grouped": {},
    "one-kv-head": {"num_key_value_heads": 1},
    "as-many-kv-heads": {"num_key_value_heads": 4, "rope_theta": 500000.0},
    "wide-heads": {"head_dim": 32, "num_attention_heads": 4},
    "untied": {"tie_word_embeddings": False},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "linear-rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3-rope": {"rope_scaling": LLAMA3, "tie_word_embeddings": False},
}


def make_folder(folder, tokenizer_from, settings, *, quantize=None, dtype=mx.float32):
    """Write a random checkpoint with mlx-lm's own classes and writers."""
    from mlx_lm.models.llama import Model, ModelArgs

    config = BASE | settings
    folder.mkdir(exist_ok=True)
    mx.random.seed(11)
    model = Model(ModelArgs.from_dict(config))
    model.update({}, strict=False)
    parameters = [(name, value) for name, value in _flat(model)]
    randomised = [
        (name, (1 + 0.1 * noise if name.endswith("norm.weight") else noise * value.shape[-1] ** -0.5).astype(dtype))
        for name, value in parameters
        for noise in [mx.random.normal(value.shape)]
    ]
    model.load_weights(randomised)
    if quantize is not None:
        model, config = quantize_model(model, config, **quantize)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)
    return folder


def _flat(model):
    from mlx.utils import tree_flatten

    return tree_flatten(model.parameters())


def oracle_logits(oracle, ids: list[int]) -> mx.array:
    """`(T, V)` of one sequence, in one pass of mlx-lm's model."""
    return oracle(mx.array([ids]), cache=[OracleCache() for _ in oracle.layers])[0]


def native_logits(model, ids: list[list[int]], caches) -> mx.array:
    found = model.logits_from_hidden(model.forward_hidden(mx.array(ids, dtype=mx.int32), caches))
    mx.eval(found)
    return found


def largest_difference(folder, dtype: str) -> float:
    """Over one prefill, chunks, single-token decode, and a ragged batch in slots."""
    oracle, _ = load_model(folder)
    model = load(folder, dtype=dtype).model
    differences = []

    def compare(found: mx.array, expected: mx.array) -> None:
        assert found.shape == expected.shape
        differences.append(mx.abs(found.astype(mx.float32) - expected.astype(mx.float32)).max().item())

    for sizes in ([6], [4, 2], [3, 1, 1, 1]):
        caches, start = model.make_cache(), 0
        for size in sizes:
            found = native_logits(model, [PROMPTS[0][start : start + size]], caches)
            compare(found[0], oracle_logits(oracle, PROMPTS[0])[start : start + size])
            start += size
    batch = RowBatch(len(model.make_cache()), max_rows=4)
    slots = [batch.join() for _ in PROMPTS]
    for slot, prompt in zip(slots, PROMPTS, strict=True):
        compare(native_logits(model, [prompt], batch.view([slot], len(prompt)))[0], oracle_logits(oracle, prompt))
        batch.advance([slot], len(prompt))
    for step in range(2):
        found = native_logits(model, [[40 + step]] * len(slots), batch.view(slots, 1))
        batch.advance(slots, 1)
        for row, prompt in enumerate(PROMPTS):
            compare(found[row], oracle_logits(oracle, [*prompt, *range(40, 41 + step)])[-1:])
    return max(differences)


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_float32_logits_equal_mlx_lm(tiny_llama, tmp_path, settings):
    """Every shape of the family: prefill, chunks, decode and ragged rows, within 1e-4."""
    folder = make_folder(tmp_path / "model", tiny_llama, settings)
    assert largest_difference(folder, "float32") < FLOAT32_TOLERANCE


@pytest.mark.parametrize("mixed", [False, True], ids=["uniform", "per-layer"])
def test_packed_logits_equal_mlx_lm(tiny_llama, tmp_path, mixed):
    """4-bit weights through the packed product, all alike or with some layers at 8 bits, within 1e-4."""

    def pick(path: str, _module) -> dict[str, object] | bool:
        return {"group_size": 32, "bits": 8, "mode": "affine"} if "v_proj" in path else True

    quantize = {"group_size": 32, "bits": 4, "mode": "affine", "quant_predicate": pick if mixed else None}
    folder = make_folder(tmp_path / "model", tiny_llama, {}, quantize=quantize)
    assert "quantization" in json.loads((folder / "config.json").read_text())
    assert largest_difference(folder, "checkpoint") < FLOAT32_TOLERANCE
    assert largest_difference(folder, "float32") < FLOAT32_TOLERANCE


def test_bfloat16_logits_equal_mlx_lm_within_its_rounding(tiny_llama, tmp_path):
    """The checkpoint's own dtype, as Macs run it."""
    folder = make_folder(tmp_path / "model", tiny_llama, {}, dtype=mx.bfloat16)
    assert largest_difference(folder, "checkpoint") < BFLOAT16_TOLERANCE


def test_an_exported_folder_is_read_by_mlx_lm(tiny_llama, tmp_path):
    """The whole of mlx-lm's `load`, tokenizer and template included."""
    from mlx_lm.utils import load as oracle_load

    folder = export(tiny_llama, tmp_path / "out")
    oracle, tokenizer = oracle_load(str(folder))
    native = load(tiny_llama)
    messages = [{"role": "user", "content": "weir"}]
    ids = native.codec.prepare_chat(messages).ids
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True) == ids
    found = native_logits(native.model, [ids], native.model.make_cache())[0]
    assert mx.abs(found - oracle_logits(oracle, ids)).max().item() < FLOAT32_TOLERANCE


QUESTIONS = [
    "What is a headrace?",
    "Name three rivers in Europe.",
    "Write one sentence about rain.",
    "What is 17 plus 25?",
    "Translate 'good morning' to French.",
    "List the primary colours.",
    "Why is the sky blue?",
    "def fibonacci(n):",
    "Give me a short recipe for bread.",
    "Who wrote Hamlet?",
]


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_starter_model_equals_mlx_lm(smollm2, tmp_path):
    """Ten prompts: logits within 1e-4, 64 equal greedy tokens, and the GGUF file equals its exported folder.

    The ten rows decode together in slots; mlx-lm then reads each whole sequence in one pass, alone, and must put
    every generated token first.
    """
    folder = export(smollm2, tmp_path / "starter")
    oracle, _ = load_model(folder)
    from_gguf, from_folder = load(smollm2, dtype="float32"), load(folder, dtype="float32")
    prompts = [from_gguf.codec.prepare_chat([{"role": "user", "content": question}]).ids for question in QUESTIONS]
    for question, ids in zip(QUESTIONS, prompts, strict=True):
        assert ids == from_folder.codec.prepare_chat([{"role": "user", "content": question}]).ids
        found = native_logits(from_gguf.model, [ids], from_gguf.model.make_cache())
        assert mx.array_equal(found, native_logits(from_folder.model, [ids], from_folder.model.make_cache())).item()
        assert mx.abs(found[0] - oracle_logits(oracle, ids)).max().item() < FLOAT32_TOLERANCE
    for ids, tokens in zip(prompts, greedy_rows(from_gguf.model, prompts, num_tokens=64), strict=True):
        best = mx.argmax(oracle_logits(oracle, ids + tokens[:-1])[len(ids) - 1 :], axis=-1)
        assert best.tolist() == tokens


def greedy_rows(model, prompts: list[list[int]], *, num_tokens: int) -> list[list[int]]:
    """Greedy decoding of all prompts together, each prefilled into its slot."""
    batch = RowBatch(len(model.layers), max_rows=len(prompts))
    slots = [batch.join() for _ in prompts]
    rows = []
    for slot, ids in zip(slots, prompts, strict=True):
        logits = native_logits(model, [ids], batch.view([slot], len(ids)))
        batch.advance([slot], len(ids))
        rows.append(mx.argmax(logits[0, -1:], axis=-1).tolist())
    for _ in range(num_tokens - 1):
        logits = native_logits(model, [row[-1:] for row in rows], batch.view(slots, 1))
        batch.advance(slots, 1)
        for row, token in zip(rows, mx.argmax(logits[:, -1], axis=-1).tolist(), strict=True):
            row.append(token)
    return rows
