"""Greedy generation through the whole engine, held to mlx-lm with the same float32 weights (rulings B-24)."""

from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx_lm.utils
import pytest
from attrs import frozen
from mlx_lm.generate import generate_step

from headrace_models import ModelSource, export, load
from headrace_sampling import SamplingParams
from headrace_scheduling import Engine, GenerateOptions, GenerationResult

NEAR_TIE = 2e-4
"""Twice the stated tolerance of logits: where the best two are closer, either token is right."""

PROMPTS = [
    "The mill stands by the river and",
    "def fibonacci(n):\n    ",
    "Q: What is the capital of France?\nA:",
    "Once upon a time, in a village behind the hills, there lived a clockmaker who",
    "The three laws of thermodynamics are",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name, price FROM products WHERE",
    "Ein Müller, der am Bach",
    "In conclusion, the evidence shows that 🙂",
]


@frozen
class OracleRun:
    """mlx-lm's greedy tokens, up to the first near-tie."""

    token_ids: tuple[int, ...]
    met_near_tie: bool


@pytest.fixture(scope="module")
def float32_folder(smollm2: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(smollm2, tmp_path_factory.mktemp("oracle") / "float32", dtype="float32")


@pytest.fixture(scope="module")
def engine(float32_folder: Path):
    with Engine.open(partial(load, float32_folder, dtype="float32"), max_rows=8) as opened:
        yield opened


def oracle_run(model: object, prompt_ids: list[int], num_tokens: int) -> OracleRun:
    tokens: list[int] = []
    for token_id, logprobs in generate_step(mx.array(prompt_ids), model, max_tokens=num_tokens):
        best = mx.topk(logprobs, 2)
        if abs((best[0] - best[1]).item()) < NEAR_TIE:
            return OracleRun(tuple(tokens), met_near_tie=True)
        tokens.append(int(token_id))
    return OracleRun(tuple(tokens), met_near_tie=False)


def greedy(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[GenerationResult]:
    options = GenerateOptions(max_tokens=num_tokens, ignore_eos=True, sampling=SamplingParams(temperature=0.0))
    return engine.generate(prompts, options)


def with_seven_others(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[GenerationResult]:
    """Generate for ten prompts in two batches of eight, so that each has seven others in flight."""
    first, last = greedy(engine, prompts[:8], num_tokens), greedy(engine, prompts[-8:], num_tokens)
    return [*first, *last[8 - (len(prompts) - 8) :]]


def compare(engine: Engine, folder: Path, num_compared_prompts: int, num_tokens: int) -> None:
    model, _ = mlx_lm.utils.load_model(folder)
    codec = load(folder, dtype="float32").codec
    encoded = [codec.encode(prompt) for prompt in PROMPTS]
    oracles = [oracle_run(model, prompt_ids, num_tokens) for prompt_ids in encoded[:num_compared_prompts]]
    num_compared = sum(len(oracle.token_ids) for oracle in oracles)
    crowded = with_seven_others(engine, encoded, num_tokens)

    for prompt_ids, oracle, neighbour in zip(encoded, oracles, crowded, strict=False):
        alone = greedy(engine, [prompt_ids], num_tokens)[0]

        assert alone.token_ids[: len(oracle.token_ids)] == oracle.token_ids
        assert neighbour.token_ids[: len(oracle.token_ids)] == oracle.token_ids
    assert sum(oracle.met_near_tie for oracle in oracles) <= 0.01 * num_compared + 1
    assert num_compared >= 0.8 * num_tokens * num_compared_prompts


def test_greedy_equals_mlx_lm_in_short(engine: Engine, float32_folder: Path) -> None:
    """Greedy tokens equal mlx-lm's, alone and with seven neighbours: two prompts, 12 tokens."""
    compare(engine, float32_folder, 2, 12)


@pytest.mark.model
@pytest.mark.timeout(600)
def test_greedy_equals_mlx_lm(engine: Engine, float32_folder: Path) -> None:
    """Greedy tokens equal mlx-lm's, alone and with seven neighbours: ten prompts, 64 tokens."""
    compare(engine, float32_folder, 10, 64)


def test_batched_logits_equal_mlx_lm(float32_folder: Path) -> None:
    """Prefill and decode logits are within 1e-4 of mlx-lm's: alone, and for a row with neighbours in slots."""
    from headrace_kvcache import RowBatch

    oracle, _ = mlx_lm.utils.load_model(float32_folder)
    loaded = load(float32_folder, dtype="float32")
    encoded = [loaded.codec.encode(prompt) for prompt in PROMPTS[:4]]
    rows = RowBatch(len(loaded.model.make_cache()), max_rows=4)
    slots = [rows.join() for _ in encoded]
    for slot, prompt_ids in zip(slots, encoded, strict=True):
        hidden = loaded.model.forward_hidden(mx.array([prompt_ids]), rows.view([slot], len(prompt_ids)))
        rows.advance([slot], len(prompt_ids))

        expected = oracle(mx.array([prompt_ids]))
        assert mx.abs(loaded.model.logits_from_hidden(hidden) - expected).max().item() < 1e-4
    step = mx.array([[260], [281], [17], [400]])
    logits = loaded.model.logits_from_hidden(loaded.model.forward_hidden(step, rows.view(slots, 1)))

    for row, prompt_ids in enumerate(encoded):
        expected = oracle(mx.array([[*prompt_ids, step[row, 0].item()]]))[0, -1]
        assert mx.abs(logits[row, 0] - expected).max().item() < 1e-4
