"""Causal attention by query tiles against MLX's own."""

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvcache.causal import causal_attention


@settings(max_examples=40, deadline=None)
@given(
    num_queries=st.integers(1, 150),
    num_before=st.integers(0, 90),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (9, 3)]),
    batch=st.integers(1, 3),
    magnitude=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_tiles_equal_mlx(num_queries, num_before, heads, batch, magnitude):
    """Any number of queries over any number of earlier columns gives what MLX's kernel gives."""
    num_heads, num_kv_heads = heads
    keys = [mx.random.key(number) for number in range(3)]
    queries = magnitude * mx.random.normal((batch, num_heads, num_queries, 8), key=keys[0])
    columns = (batch, num_kv_heads, num_before + num_queries)
    held_keys, held_values = mx.random.normal((*columns, 8), key=keys[1]), mx.random.normal((*columns, 5), key=keys[2])

    expected = mx.fast.scaled_dot_product_attention(queries, held_keys, held_values, scale=0.3, mask="causal")

    assert mx.allclose(causal_attention(queries, held_keys, held_values, scale=0.3), expected, rtol=1e-4, atol=1e-5)
