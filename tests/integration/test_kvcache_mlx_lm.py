"""`KVCache` in mlx-lm's hands: its models and its generation loop run on it and cannot tell the difference."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache as MlxLmCache
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from headrace_kvcache import KVCache, RowBatch

NUM_LAYERS = 2


@pytest.fixture(scope="module")
def model():
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=NUM_LAYERS,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=101,
        tie_word_embeddings=False,
    )
    mx.random.seed(4)
    model = llama.Model(arguments)
    mx.eval(model.parameters())
    return model


def caches(kind):
    return [kind() for _ in range(NUM_LAYERS)]


def ids(count, seed):
    mx.random.seed(seed)
    return mx.random.randint(0, 101, (count,))


def test_generation_equals_mlx_lms_own_cache(model):
    """Greedy tokens and log-probabilities over chunked prefill, a slab border and a trim are equal bit for bit."""
    results = []
    for kind in (KVCache, MlxLmCache):
        cache, result = caches(kind), []
        for prompt, trimmed in ((ids(250, 1), 7), (ids(5, 2), 0)):
            steps = generate_step(prompt, model, max_tokens=12, prompt_cache=cache, prefill_step_size=64)
            result += [(token, mx.array(logprobs)) for token, logprobs in steps]
            assert can_trim_prompt_cache(cache)
            assert trim_prompt_cache(cache, trimmed) == trimmed
        results.append(result)
        assert cache[0].size() == 250 + 12 - 7 + 5 + 12
    for (token, logprobs), (own_token, own_logprobs) in zip(*results, strict=True):
        assert token == own_token
        assert mx.array_equal(logprobs, own_logprobs)


class AsUpdate:
    """A batch's view in mlx-lm's protocol, which asks for keys, values and a mask instead of attention."""

    def __init__(self, view):
        self.offset = view.offset
        self._view = view

    def make_mask(self, num_tokens, **_):
        return None

    def update_and_fetch(self, keys, values):
        self.appended = keys, values
        return keys, values


def test_rows_in_slots_give_the_logits_of_mlx_lms_model_alone(model, monkeypatch):
    """A ragged batch of slots, with attention handed to `attend`, equals each prompt alone within 1e-4 (float32)."""

    def attention(queries, keys, values, cache, scale, mask, sinks=None):
        return cache._view.attend(queries, keys, values, scale=scale)

    prompts, replies = [ids(9, 3), ids(30, 4), ids(17, 5)], ids(6, 6).reshape(3, 2)
    alone = []
    for prompt, reply in zip(prompts, replies, strict=True):
        cache = caches(MlxLmCache)
        model(prompt[None], cache=cache)
        alone.append([model(token.reshape(1, 1), cache=cache)[0, -1] for token in reply])
    monkeypatch.setattr(llama, "scaled_dot_product_attention", attention)
    batch = RowBatch(NUM_LAYERS, max_rows=4)
    for _ in range(4):
        batch.join()
    batch.leave(1)
    slots = [0, 2, 3]
    lengths = [len(prompt) for prompt in prompts]
    padded = mx.stack([mx.pad(prompt, (0, 30 - len(prompt))) for prompt in prompts])
    model(padded, cache=[AsUpdate(view) for view in batch.view(slots, 30, lengths=lengths)])
    batch.advance(slots, lengths)
    for step in range(2):
        logits = model(replies[:, step : step + 1], cache=[AsUpdate(view) for view in batch.view(slots, 1)])
        batch.advance(slots, 1)
        for row in range(3):
            assert mx.abs(logits[row, -1] - alone[row][step]).max().item() <= 1e-4
