"""A decode step over slots allocates scores and masks, and nothing that has the size of the cache."""

import gc

import mlx.core as mx
import pytest

from headrace_kvcache import (
    ChunkedRowBatch,
    QuantizedRowBatch,
    RotatingQuantizedRowBatch,
    RotatingRowBatch,
    RowBatch,
    attend,
)

HEADS, KV_HEADS, HEAD_DIM = 2, 1, 64
NUM_ROWS = 8

KINDS = {
    "plain": lambda num_layers: RowBatch(num_layers, max_rows=NUM_ROWS),
    "quantized": lambda num_layers: QuantizedRowBatch(num_layers, max_rows=NUM_ROWS, bits=8, group_size=64),
    "ring": lambda num_layers: RotatingRowBatch(num_layers, max_rows=NUM_ROWS, window=8192),
    "chunked": lambda num_layers: ChunkedRowBatch(num_layers, max_rows=NUM_ROWS, chunk_size=8192),
    "quantized ring": lambda num_layers: RotatingQuantizedRowBatch(num_layers, max_rows=NUM_ROWS, window=8192),
}


def step(batch, slots, hidden):
    for view in batch.view(slots, 1):
        heads = hidden.reshape(len(slots), HEADS, 1, HEAD_DIM)
        keys = heads[:, :KV_HEADS]
        hidden = attend(view, heads, keys, keys, scale=0.1).reshape(len(slots), -1) + hidden * 0.5
    batch.advance(slots, 1)
    return hidden


def peak_of_steps(kind, num_tokens, *, num_layers, is_pipelined=False):
    """Return the peak memory beyond what is held, over decode steps of rows that end near `num_tokens`."""
    batch = KINDS[kind](num_layers)
    slots = [batch.join(num_tokens=num_tokens) for _ in range(NUM_ROWS)]
    for slot in slots:
        end = num_tokens - 20 - slot
        batch.view([slot], end)
        batch.advance([slot], end)
    hidden = step(batch, slots, mx.ones((NUM_ROWS, HEADS * HEAD_DIM)))
    mx.eval(hidden)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    unread = hidden
    for _ in range(6):
        hidden = step(batch, slots, hidden)
        mx.async_eval(hidden)
        mx.eval(unread if is_pipelined else hidden)
        unread = hidden
    mx.eval(hidden)
    return mx.get_peak_memory() - before, batch.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_a_layers_decode_step_grows_by_its_scores(kind):
    """From 512 to 8,192 tokens the peak grows by at most 12 * B * H bytes per position: scores and a mask.

    H counts query heads.
    """
    small, _ = peak_of_steps(kind, 512, num_layers=1)
    large, _ = peak_of_steps(kind, 8192, num_layers=1)
    assert large - small <= 12 * NUM_ROWS * HEADS * (8192 - 512)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_pipelined", [False, True])
def test_a_decode_step_allocates_nothing_of_the_caches_size(kind, is_pipelined):
    """Six layers, also with a step dispatched before the last is read: the scores of the few layers in flight.

    MLX allocates a few layers ahead of what runs; a layer is a sixth of the cache here.
    """
    small, _ = peak_of_steps(kind, 512, num_layers=6, is_pipelined=is_pipelined)
    large, held = peak_of_steps(kind, 8192, num_layers=6, is_pipelined=is_pipelined)
    assert large - small <= 4 * 12 * NUM_ROWS * HEADS * (8192 - 512)
    assert large < held / 12
