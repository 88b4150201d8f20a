"""Every path of one KV scheme through a real model: single caches, slots, joined and extracted rows."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from headrace_kvcache import KVScheme, make_row_batch
from headrace_models import load

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

NUM_TOKENS = 40
NEAR_TIE = 1e-3
"""Where the best two logits are closer, the order of additions decides and a row is not compared further."""


TEXT = "The mill stands by the river. In the year 1812 the miller wrote to his brother that "


@pytest.fixture(scope="module")
def starter(smollm2):
    return load(smollm2)


@pytest.fixture(scope="module")
def gemma(gemma3_270m):
    return load(gemma3_270m)


def best_two(logits: mx.array) -> tuple[int, float]:
    order = mx.argsort(-logits)[:2]
    return int(order[0].item()), (logits[order[0]] - logits[order[1]]).item()


def decode(model, first: mx.array, caches_of_step: Callable[[], list]) -> list[tuple[int, float]]:
    """Feed greedy tokens one at a time, starting from the logits after the prompt; token and margin of each."""
    picked = [best_two(first)]
    for _ in range(NUM_TOKENS - 1):
        hidden = model.forward_hidden(mx.array([[picked[-1][0]]]), caches_of_step())
        picked.append(best_two(model.logits_from_hidden(hidden)[0, -1]))
    return picked


def prefill(model, prompt: list[int], caches: list) -> mx.array:
    return model.logits_from_hidden(model.forward_hidden(mx.array([prompt]), caches)[:, -1:])[0, -1]


def single(model, scheme: KVScheme, prompt: list[int]) -> tuple[list, mx.array]:
    caches = model.make_cache()
    first = prefill(model, prompt, caches)
    scheme.convert(caches)
    return caches, first


def by_slots(model, batch, slot: int) -> Callable[[], list]:
    """Views of one step for a row; the row is advanced when the next step is asked for."""
    state = {"pending": False}

    def step() -> list:
        if state["pending"]:
            batch.advance([slot], 1)
        state["pending"] = True
        return batch.view([slot], 1)

    return step


def run_paths(model, scheme: KVScheme, prompt: list[int]) -> dict[str, list[tuple[int, float]]]:
    caches, first = single(model, scheme, prompt)
    runs = {"single": decode(model, first, lambda: caches)}

    caches, first = single(model, scheme, prompt)
    joined = make_row_batch(caches, max_rows=4)
    neighbours = [joined.join_caches(single(model, scheme, prompt[: 30 + 7 * row])[0]) for row in range(2)]
    slot = joined.join_caches(caches)
    runs["joined"] = decode(model, first, by_slots(model, joined, slot))

    caches, first = single(model, scheme, prompt)
    holder = make_row_batch(caches, max_rows=2)
    extracted = holder.extract(holder.join_caches(caches))
    runs["extracted"] = decode(model, first, lambda: extracted)
    assert len(neighbours) == 2

    if scheme.kind == "unquantized":
        slots = make_row_batch(model.make_cache(), max_rows=2)
        slot = slots.join()
        first = prefill(model, prompt, slots.view([slot], len(prompt)))
        slots.advance([slot], len(prompt))
        runs["slots"] = decode(model, first, by_slots(model, slots, slot))
    return runs


def check_paths(loaded, scheme: KVScheme, num_repeats: int) -> None:
    runs = run_paths(loaded.model, scheme, loaded.codec.encode(TEXT * num_repeats))
    expected = runs.pop("single")
    num_compared = next((index for index, (_, margin) in enumerate(expected) if margin < NEAR_TIE), NUM_TOKENS)
    assert num_compared >= NUM_TOKENS // 2
    for path, picked in runs.items():
        assert [token for token, _ in picked[:num_compared]] == [token for token, _ in expected[:num_compared]], path


@pytest.mark.parametrize("text", ["off", "8", "4"])
def test_every_path_of_a_scheme_decodes_the_same_tokens(starter, text):
    """Single, slots, joined and extracted rows pick equal greedy tokens up to the first near-tie."""
    check_paths(starter, KVScheme.parse(text), num_repeats=4)


@pytest.mark.parametrize("text", ["off", "8"])
def test_every_path_crosses_the_window(gemma, text):
    """The same for rings beside full layers, from a prompt longer than the window of 512."""
    check_paths(gemma, KVScheme.parse(text), num_repeats=27)
