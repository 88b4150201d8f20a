"""The real Gemma 3 270M against mlx-lm's own class with the same weights, past its window of 512 positions."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from headrace_kvcache import make_row_batch
from headrace_models import load, read_config
from headrace_models.building import build_dense
from headrace_models.weights import WeightForm, open_checkpoint

WORDS = "The river was low that summer and the mill stood still until the rain came down from the hills"
NUM_TOKENS = 24
# Float32 sums in another order, over 18 layers and logits of magnitude 30.
TOLERANCE = 2e-3
CHUNK = 256
WINDOW = 512


@pytest.fixture(scope="module")
def model(gemma3_270m):
    config = read_config(gemma3_270m)
    checkpoint = open_checkpoint(gemma3_270m, config)
    checkpoint.form = WeightForm(dtype=mx.float32, keep_packed=False)
    return build_dense(config, checkpoint, on_gpu=False)


@pytest.fixture(scope="module")
def codec(gemma3_270m):
    from headrace_models import load_codec

    return load_codec(gemma3_270m)


@pytest.fixture(scope="module")
def oracle(gemma3_270m, tmp_path_factory):
    """mlx-lm's model on the exported folder: its own reading of the config, float32 weights."""
    from headrace_models import export

    folder = export(gemma3_270m, tmp_path_factory.mktemp("gemma3") / "model")
    return load_model(folder)[0]


@pytest.fixture(scope="module")
def prompts(codec):
    """Two prompts past the window, one just below it, and a short one; each has text of its own."""
    words = WORDS.split()
    texts = [
        " ".join(words[(3 * start + step * stride) % len(words)] for step in range(length))
        for start, stride, length in ((0, 1, 640), (1, 5, 560), (2, 7, 505), (3, 1, 9))
    ]
    encoded = [codec.encode(text) for text in texts]
    assert [len(ids) > WINDOW for ids in encoded] == [True, True, False, False]
    assert len(encoded[2]) + NUM_TOKENS > WINDOW
    return encoded


def oracle_logits(oracle, ids: list[int], num_last: int) -> mx.array:
    """The last positions' logits of one sequence, in one pass."""
    hidden = oracle.model(mx.array([ids]), make_prompt_cache(oracle))[:, -num_last:]
    return oracle.model.embed_tokens.as_linear(hidden)[0]


def prefill(model, ids: list[int], caches) -> mx.array:
    """Append a prompt in chunks and return the last position's logits `(1, V)`."""
    for start in range(0, len(ids), CHUNK):
        hidden = model.forward_hidden(mx.array([ids[start : start + CHUNK]], dtype=mx.int32), caches)
        mx.eval(hidden)
    return model.logits_from_hidden(hidden[:, -1:])[:, 0]


def decode_alone(model, ids: list[int]) -> tuple[list[int], list[mx.array]]:
    caches = model.make_cache()
    logits = [prefill(model, ids, caches)]
    tokens = [mx.argmax(logits[-1]).item()]
    while len(tokens) < NUM_TOKENS:
        hidden = model.forward_hidden(mx.array([tokens[-1:]], dtype=mx.int32), caches)
        logits.append(model.logits_from_hidden(hidden)[:, 0])
        tokens.append(mx.argmax(logits[-1]).item())
    return tokens, logits


def decode_together(model, prompts) -> list[list[int]]:
    batch = make_row_batch(model.make_cache(), max_rows=len(prompts))
    slots = [batch.join() for _ in prompts]
    rows = []
    for slot, ids in zip(slots, prompts, strict=True):
        for start in range(0, len(ids), CHUNK):
            part = ids[start : start + CHUNK]
            hidden = model.forward_hidden(mx.array([part], dtype=mx.int32), batch.view([slot], len(part)))
            mx.eval(hidden)
            batch.advance([slot], len(part))
        rows.append([mx.argmax(model.logits_from_hidden(hidden[:, -1:])[0, 0]).item()])
    for _ in range(NUM_TOKENS - 1):
        hidden = model.forward_hidden(mx.array([row[-1:] for row in rows], dtype=mx.int32), batch.view(slots, 1))
        batch.advance(slots, 1)
        for row, token in zip(rows, mx.argmax(model.logits_from_hidden(hidden)[:, 0], axis=-1).tolist(), strict=True):
            row.append(token)
    return rows


@pytest.mark.model
@pytest.mark.timeout(600)
def test_greedy_decoding_equals_mlx_lm_past_the_window(model, oracle, prompts):
    """Alone in chunks, and four ragged rows in slots: the tokens that mlx-lm puts first in one pass, and its logits."""
    together = decode_together(model, prompts)
    for ids, in_batch in zip(prompts, together, strict=True):
        alone, logits = decode_alone(model, ids)
        expected = oracle_logits(oracle, ids + alone[:-1], NUM_TOKENS)
        assert mx.abs(mx.concatenate(logits) - expected).max().item() < TOLERANCE
        assert mx.argmax(expected, axis=-1).tolist() == alone == in_batch


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_windows_matter(model, prompts):
    """The long prompt is past the window: with full attention everywhere the logits would differ."""
    from headrace_kvcache import KVCache

    full = [KVCache() for _ in model.layers]
    windows = [layer.attention.window for layer in model.layers]
    found = prefill(model, prompts[0], model.make_cache())
    try:
        for layer in model.layers:
            layer.attention.window = None
        without = prefill(model, prompts[0], full)
    finally:
        for layer, window in zip(model.layers, windows, strict=True):
            layer.attention.window = window
    assert mx.abs(found - without).max().item() > 0.1


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_whole_model_loads_and_knows_facts(gemma3_270m):
    """`load` of the K-quant file: family, representation, layer kinds, and a sensible continuation."""
    loaded = load(gemma3_270m, dtype="float32")
    assert loaded.config.model_type == "gemma3_text"
    windows = [layer.attention.window for layer in loaded.model.layers]
    assert windows == [*[WINDOW] * 5, None] * 3
    ids = loaded.codec.encode("The capital of France is")
    logits = prefill(loaded.model, ids, loaded.model.make_cache())
    assert "Paris" in loaded.codec.decode(mx.argsort(-logits[0])[:3].tolist())
