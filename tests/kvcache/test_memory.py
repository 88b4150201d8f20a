"""A decode step allocates nothing that has the size of the cache."""

import gc

import mlx.core as mx
import pytest

from headrace_kvcache import (
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    RotatingQuantizedKVCache,
    RowBatch,
    attend,
)

HEAD_DIM = 64
NUM_LAYERS = 6
NUM_ROWS = 8


def batch_at(num_tokens, ends, *, is_one_class=True):
    """Rows with the given ends, in slots that hold `num_tokens`; attention over the prompt is not the point here."""
    batch = RowBatch(NUM_LAYERS, max_rows=NUM_ROWS)
    slots = [batch.join(num_tokens=num_tokens if is_one_class else 0) for _ in ends]
    for slot, end in zip(slots, ends, strict=True):
        batch.view([slot], end)
        batch.advance([slot], end)
    return batch, slots


def step(batch, slots, hidden):
    for view in batch.view(slots, 1):
        heads = hidden.reshape(len(slots), 2, 1, HEAD_DIM)
        hidden = attend(view, heads, heads[:, :1], heads[:, :1], scale=0.1).reshape(len(slots), -1) + hidden * 0.5
    batch.advance(slots, 1)
    return hidden


def ends_of(kind, num_tokens):
    longest = num_tokens - 20
    ragged = [longest, *range(3, 3 + NUM_ROWS - 1)]
    return {"ragged": ragged, "classes": ragged, "equal": [longest] * NUM_ROWS, "one": [longest]}[kind]


@pytest.mark.parametrize("num_tokens", [512, 8192])
@pytest.mark.parametrize("kind", ["ragged", "classes", "equal", "one"])
@pytest.mark.parametrize("is_pipelined", [False, True])
def test_an_append_is_in_place(num_tokens, kind, is_pipelined):
    """Peak memory of steps stays below half of one buffer, also when a step is dispatched before the last is read."""
    batch, slots = batch_at(num_tokens, ends_of(kind, num_tokens), is_one_class=kind != "classes")
    hidden = mx.ones((len(slots), 2 * HEAD_DIM))
    hidden = step(batch, slots, hidden)
    mx.eval(hidden)
    gc.collect()
    mx.clear_cache()
    buffer_bytes = max(array.nbytes for array in batch.arrays)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    unread = None
    for _ in range(6):
        hidden = step(batch, slots, hidden)
        if is_pipelined:
            mx.async_eval(hidden)
            if unread is not None:
                mx.eval(unread)
            unread = hidden
        else:
            mx.eval(hidden)
    mx.eval(hidden)
    # Scores and masks of one layer: rows * heads * columns, well below rows * columns * HEAD_DIM.
    assert mx.get_peak_memory() - before < buffer_bytes / 2
    assert mx.get_active_memory() - before < buffer_bytes / 8


def test_a_lone_append_is_in_place():
    """The same for the single-row cache, between two slabs."""
    cache = KVCache()
    one = mx.ones((1, 1, 1, HEAD_DIM))
    cache.update_and_fetch(*[mx.ones((1, 1, 8000, HEAD_DIM))] * 2)
    mx.eval(attend(cache, one, one, one, scale=0.1))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(6):
        mx.eval(attend(cache, one, one, one, scale=0.1))
    assert mx.get_peak_memory() - before < cache.nbytes / 4


def test_a_row_that_joins_costs_its_own_bytes():
    """Joining a free slot of allocated buffers and prefilling it copies no neighbour."""
    batch, slots = batch_at(4096, [4000] * (NUM_ROWS - 1))
    mx.eval(step(batch, slots, mx.ones((len(slots), 2 * HEAD_DIM))))
    slot = batch.join()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    chunk = mx.ones((1, 1, 16, HEAD_DIM))
    outputs = [attend(view, chunk, chunk, chunk, scale=0.1) for view in batch.view([slot], 16)]
    mx.eval(outputs)
    assert mx.get_peak_memory() - before < batch.nbytes / (2 * NUM_LAYERS) / 2


KINDS = {
    "plain": lambda size: KVCache(),
    "ring": RotatingKVCache,
    "chunked": ChunkedKVCache,
    "quantized": lambda size: QuantizedKVCache(bits=4, group_size=HEAD_DIM),
    "quantized ring": lambda size: RotatingQuantizedKVCache(size, bits=4, group_size=HEAD_DIM),
}


def peak_of_a_lone_step(make, num_tokens):
    """Bytes that a decode step takes beyond what is there before, past the wrap where there is one."""
    num_kv_heads, num_heads = 2, 8
    cache = make(num_tokens)
    one, queries = mx.ones((1, num_kv_heads, 1, HEAD_DIM)), mx.ones((1, num_heads, 1, HEAD_DIM))
    cache.update_and_fetch(*[mx.ones((1, num_kv_heads, num_tokens, HEAD_DIM))] * 2)
    for _ in range(3):
        mx.eval(attend(cache, queries, one, one, scale=0.1))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(6):
        mx.eval(attend(cache, queries, one, one, scale=0.1))
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("kind", KINDS)
def test_a_lone_step_grows_by_its_scores_alone(kind):
    """From 512 to 8,192 tokens the peak of a step grows by at most 12 bytes per query head and position."""
    short, long = (peak_of_a_lone_step(KINDS[kind], num_tokens) for num_tokens in (512, 8192))
    assert long - short <= 12 * 8 * (8192 - 512)
