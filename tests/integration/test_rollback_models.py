"""Greedy decoding with drafts that are wrong at random equals plain greedy decoding, past every window.

mlx-lm 0.32.2 asks once whether its caches can be trimmed and then believes a `trim` that does nothing, so that its
speculative decoding gives other tokens from the window on; the same models on Headrace's rounds do not.
"""

import shutil
from importlib.metadata import version

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import gemma3_text, qwen3_next
from mlx_lm.models.cache import make_prompt_cache as make_mlx_lm_cache
from mlx_lm.utils import load_model, save_config, save_model

from headrace_kvcache import bind_cache_rollback, bind_row_cache_rollback, make_prompt_cache, make_row_batch
from headrace_models import export, load

WINDOW = 32
VOCABULARY = 320
NUM_TOKENS = 300
PROMPTS = [[5, 77, 300, 4, 19, 200, 31, 8, 9, 111], [2, 250, 17, 63, 91, 128, 7], [33, 180, 240, 12, 99, 1, 6, 45]]
WORDS = "The river was low that summer and the mill stood still until the rain came down from the hills"
# Twice the stated tolerance of logits: where the best two are closer, either token is right.
NEAR_TIE = 2e-4

GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 24,
    "rope_theta": 1e6,
    "rope_local_base_freq": 500.0,
    "max_position_embeddings": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [0, 1, 2, 3],
    "moe_intermediate_size": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 1000,
    "full_attention_interval": 2,
    "head_dim": 32,
}


def make_gemma3(seed, **settings):
    """Random weights of which the layers, not the last token's embedding, decide the next token."""
    mx.random.seed(seed)
    model = gemma3_text.Model(gemma3_text.ModelArgs.from_dict(GEMMA3 | settings))
    model.sanitize({})
    model.load_weights([(name, _random(name, value.shape)) for name, value in tree_flatten(model.parameters())])
    mx.eval(model.parameters())
    return model


def _random(name, shape):
    noise = mx.random.normal(shape)
    if name.endswith("norm.weight"):
        return 0.2 * noise + (10 if name == "model.norm.weight" else 0)
    return noise * (0.01 if "embed" in name else 1.5 * shape[-1] ** -0.5)


def mlx_lm_forward(model):
    return lambda ids, caches: model(mx.array(ids), cache=caches)


def native_forward(model):
    return lambda ids, caches: model.logits_from_hidden(model.forward_hidden(mx.array(ids, dtype=mx.int32), caches))


def greedy(forward, prompt, caches, *, num_tokens=NUM_TOKENS, chunk=256):
    """Return the tokens of plain greedy decoding, one forward each, up to the first near-tie."""
    for start in range(0, len(prompt) - 1, chunk):
        mx.eval(forward([prompt[start : min(start + chunk, len(prompt) - 1)]], caches))
    tokens = [prompt[-1]]
    while len(tokens) <= num_tokens:
        logits = forward([tokens[-1:]], caches)[0, -1].astype(mx.float32)
        best = mx.topk(logits, 2)
        if abs((best[1] - best[0]).item()) < NEAR_TIE:
            break
        tokens.append(mx.argmax(logits).item())
    assert len(tokens) > 0.7 * num_tokens, "the prompt has a near-tie too early"
    return tokens[1:]


class Drafts:
    """Drafts that are the model's own tokens, each replaced by another one with a probability."""

    def __init__(self, tokens, seed):
        self.tokens = tokens
        self.random = np.random.default_rng(seed)

    def after(self, position, count):
        right = (self.tokens[position : position + count] + [0] * count)[:count]
        wrong = self.random.random(count) < 0.4
        return [(token + 1) % VOCABULARY if bad else token for token, bad in zip(right, wrong, strict=True)]


def num_accepted(drafts, chosen):
    return next((index for index, draft in enumerate(drafts) if draft != chosen[index]), len(drafts))


class Counts:
    """What a drafted run did."""

    def __init__(self):
        self.rounds = self.drafted = self.accepted = self.refused = 0


def drafted_greedy(forward, prompt, expected, caches, *, chunk=256):
    """Return as many tokens as expected, decoded in rounds of up to four drafts, without them where none fit."""
    counts, draft = Counts(), Drafts(expected, len(prompt))
    transaction = bind_cache_rollback(caches)
    for start in range(0, len(prompt) - 1, chunk):
        mx.eval(forward([prompt[start : min(start + chunk, len(prompt) - 1)]], caches))
    pending, tokens = prompt[-1], []
    while len(tokens) < len(expected):
        drafts = draft.after(len(tokens), int(draft.random.integers(0, 5)))
        if not transaction.can_begin(len(drafts)):
            counts.refused += 1
            drafts = []
            chosen = mx.argmax(forward([[pending]], caches)[0], axis=-1).tolist()
            accepted = 0
        else:
            transaction.begin(len(drafts))
            chosen = mx.argmax(forward([[pending, *drafts]], caches)[0], axis=-1).tolist()
            accepted = num_accepted(drafts, chosen)
            transaction.resolve(accepted)
            counts.rounds += 1
        counts.drafted, counts.accepted = counts.drafted + len(drafts), counts.accepted + accepted
        tokens += chosen[: accepted + 1]
        pending = tokens[-1]
    return tokens[: len(expected)], counts


def drafted_rows(forward, prompts, expected, prototypes, *, chunk=256):
    """The same with all rows in one batch of slots, each with its own drafts and its own acceptance."""
    batch = make_row_batch(prototypes, max_rows=len(prompts))
    slots = [batch.join() for _ in prompts]
    for slot, prompt in zip(slots, prompts, strict=True):
        for start in range(0, len(prompt) - 1, chunk):
            part = prompt[start : min(start + chunk, len(prompt) - 1)]
            mx.eval(forward([part], batch.view([slot], len(part))))
            batch.advance([slot], len(part))
    transaction = bind_row_cache_rollback([batch], len(prompts), slots=slots)
    sources = [Drafts(tokens, index) for index, tokens in enumerate(expected)]
    rows = [[prompt[-1]] for prompt in prompts]
    while any(len(row) <= len(tokens) for row, tokens in zip(rows, expected, strict=True)):
        drafts = [source.after(len(row) - 1, 3) for source, row in zip(sources, rows, strict=True)]
        transaction.begin(3)
        ids = [[row[-1], *own] for row, own in zip(rows, drafts, strict=True)]
        chosen = mx.argmax(forward(ids, batch.view(slots, 4)), axis=-1).tolist()
        batch.advance(slots, 4)
        accepted = [num_accepted(own, picked) for own, picked in zip(drafts, chosen, strict=True)]
        transaction.resolve(accepted)
        for row, picked, count in zip(rows, chosen, accepted, strict=True):
            row.extend(picked[: count + 1])
        batch.check_integrity()
        transaction.check_integrity()
    return [row[1 : len(tokens) + 1] for row, tokens in zip(rows, expected, strict=True)]


def first_difference(left, right):
    return next((index for index, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None)


@pytest.fixture(scope="module")
def tiny():
    return make_gemma3(4)


@pytest.fixture(scope="module")
def plain(tiny):
    rows = [greedy(mlx_lm_forward(tiny), prompt, make_mlx_lm_cache(tiny)) for prompt in PROMPTS]
    assert [len(row) for row in rows] == [NUM_TOKENS] * 3
    assert min(len(set(row)) for row in rows) > 40, "a reply that repeats itself would hide what a cache lost"
    return rows


@pytest.mark.model
@pytest.mark.skipif(version("mlx-lm") != "0.32.2", reason="what this version does")
def test_mlx_lm_diverges_at_the_window(tiny, plain):
    """The fault: mlx-lm's own speculative decoding leaves its own greedy decoding where the window is full."""
    drafter, prompt = make_gemma3(8), mx.array(PROMPTS[0])
    alone = [int(token) for token, _ in generate_step(prompt, tiny, max_tokens=100)]
    assert alone == plain[0][:100]
    run = speculative_generate_step(prompt, tiny, drafter, num_draft_tokens=3, max_tokens=100)
    drafted = [int(token) for token, _, _ in run]
    differs_at = first_difference(drafted, alone)
    assert differs_at is not None
    print(f"\nmlx-lm {version('mlx-lm')} differs at position {len(PROMPTS[0]) + differs_at}, window {WINDOW}")
    assert WINDOW - 4 <= len(PROMPTS[0]) + differs_at <= WINDOW + 20


@pytest.mark.model
def test_wrong_drafts_change_nothing_on_mlx_lms_classes(tiny, plain):
    """mlx-lm's Gemma 3 on Headrace's caches: 300 tokens, ten windows long, every round drafted."""
    for prompt, expected in zip(PROMPTS, plain, strict=True):
        found, counts = drafted_greedy(mlx_lm_forward(tiny), prompt, expected, make_prompt_cache(tiny))
        assert first_difference(found, expected) is None
        assert counts.refused == 0
        assert 0.2 < counts.accepted / counts.drafted < 0.8


@pytest.mark.model
def test_wrong_drafts_change_nothing_on_mlx_lms_caches(tiny, plain):
    """mlx-lm's own caches under Headrace's rounds: drafts up to the wrap, none after it, right tokens throughout."""
    found, counts = drafted_greedy(mlx_lm_forward(tiny), PROMPTS[0], plain[0], make_mlx_lm_cache(tiny))
    assert first_difference(found, plain[0]) is None
    assert counts.rounds > 3
    assert counts.refused > 200


@pytest.mark.model
@pytest.mark.parametrize("bits", [8, 4])
def test_wrong_drafts_change_nothing_on_quantized_rings(tiny, bits):
    """Quantized caches, rings too: equal to plain greedy decoding on the same scheme."""
    from headrace_kvcache import KVScheme

    scheme, forward = KVScheme.uniform(bits, 32), mlx_lm_forward(tiny)
    expected = greedy(forward, PROMPTS[1], make_prompt_cache(tiny, scheme=scheme))
    found, counts = drafted_greedy(forward, PROMPTS[1], expected, make_prompt_cache(tiny, scheme=scheme))
    assert first_difference(found, expected) is None
    assert counts.refused == 0


@pytest.mark.model
def test_wrong_drafts_change_nothing_on_the_native_family(tiny, plain, tiny_llama, tmp_path):
    """Headrace's Gemma 3 over `attend`: alone, and three rows in slots with acceptances of their own."""
    save_model(tmp_path, tiny)
    save_config(dict(GEMMA3), tmp_path / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_llama / name, tmp_path / name)
    model = load(tmp_path, dtype="float32").model
    forward = native_forward(model)
    for prompt, expected in zip(PROMPTS, plain, strict=True):
        found, _ = drafted_greedy(forward, prompt, expected, model.make_cache())
        assert first_difference(found, expected) is None
    assert drafted_rows(forward, PROMPTS, plain, model.make_cache()) == plain


class Recording:
    """mlx-lm's gated delta layer, telling its cache how to replay a step: the layer again, over what is kept."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, inputs, mask=None, cache=None):
        from headrace_kvcache import RecurrentCache

        outputs = self.layer(inputs, mask, cache)

        def replay(arrays, kept):
            scratch = RecurrentCache(2)
            scratch.state = (arrays, kept.lengths, 0)
            self.layer(inputs, scratch.make_mask(inputs.shape[1]), scratch)
            return [scratch[0], scratch[1]]

        cache.record(replay)
        return outputs


@pytest.mark.model
def test_wrong_drafts_change_nothing_on_a_hybrid():
    """Gated delta layers replay what is kept (K-94): Qwen 3 Next, alone and in slots, equals plain greedy decoding."""
    mx.random.seed(5)
    model = qwen3_next.Model(qwen3_next.ModelArgs.from_dict(QWEN3_NEXT))
    mx.eval(model.parameters())
    forward = mlx_lm_forward(model)
    expected = [greedy(forward, prompt, make_prompt_cache(model), num_tokens=150) for prompt in PROMPTS]
    _, untold = drafted_greedy(forward, PROMPTS[0], expected[0][:20], make_prompt_cache(model))
    assert untold.drafted == 0, "layers that do not tell how to replay get no drafts"
    for layer in model.layers:
        if layer.is_linear:
            layer.linear_attn = Recording(layer.linear_attn)
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        found, counts = drafted_greedy(forward, prompt, tokens, make_prompt_cache(model))
        assert first_difference(found, tokens) is None
        assert counts.refused == 0


# ---- the real one ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemma3(gemma3_270m):
    return load(gemma3_270m, dtype="float32")


def real_prompts(codec):
    words = WORDS.split()
    texts = [
        " ".join(words[(3 * start + step * stride) % len(words)] for step in range(length))
        for start, stride, length in ((0, 1, 400), (1, 5, 330), (2, 7, 480))
    ]
    return [codec.encode(text) for text in texts]


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_wrong_drafts_change_nothing_on_gemma_3_270m_across_its_window(gemma3):
    """300 tokens from below position 512 to beyond it, drafts rejected at random: alone and three rows in slots."""
    model, prompts = gemma3.model, real_prompts(gemma3.codec)
    forward = native_forward(model)
    assert all(len(prompt) < 512 < len(prompt) + NUM_TOKENS for prompt in prompts[:2])
    expected = [greedy(forward, prompt, model.make_cache()) for prompt in prompts]
    found, counts = drafted_greedy(forward, prompts[0], expected[0], model.make_cache())
    print(f"\n{counts.rounds} rounds, {counts.accepted} of {counts.drafted} drafts accepted, {len(found)} tokens")
    assert first_difference(found, expected[0]) is None
    assert counts.refused == 0
    together = drafted_rows(forward, prompts, expected, model.make_cache())
    assert [first_difference(row, tokens) for row, tokens in zip(together, expected, strict=True)] == [None] * 3


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.skipif(version("mlx-lm") != "0.32.2", reason="what this version does")
def test_mlx_lm_diverges_on_gemma_3_270m(gemma3_270m, gemma3, tmp_path_factory):
    """The fault on real weights: mlx-lm's own greedy and speculative decoding part where the window is full."""
    model, _ = load_model(export(gemma3_270m, tmp_path_factory.mktemp("gemma3") / "model"))
    drafter = make_gemma3(8, vocab_size=model.args.vocab_size)
    prompt = real_prompts(gemma3.codec)[0][-470:]
    alone = [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=120)]
    run = speculative_generate_step(mx.array(prompt), model, drafter, num_draft_tokens=3, max_tokens=120)
    differs_at = first_difference([int(token) for token, _, _ in run], alone)
    print(f"\nmlx-lm {version('mlx-lm')} differs at position {differs_at and len(prompt) + differs_at}, window 512")
    assert differs_at is not None
    assert len(prompt) + differs_at >= 512 - 8
