"""Attention of one query per row against MLX's own."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvcache.attention import masked_attention, prefers_own_forms
from headrace_kvcache.single_query import single_query_attention


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (9, 3)]),
    magnitude=st.sampled_from([0.1, 1.0, 30.0]),
    is_masked=st.booleans(),
)
def test_one_query_equals_mlx(lengths, heads, magnitude, is_masked):
    """Rows of any lengths over their own columns give what MLX's kernel gives; other columns do not count."""
    num_heads, num_kv_heads = heads
    keys = [mx.random.key(number) for number in range(3)]
    queries = magnitude * mx.random.normal((len(lengths), num_heads, 1, 8), key=keys[0])
    columns = (len(lengths), num_kv_heads, max(lengths))
    held_keys, held_values = mx.random.normal((*columns, 8), key=keys[1]), mx.random.normal((*columns, 5), key=keys[2])
    mask = mx.arange(max(lengths)) < mx.array(lengths)[:, None, None, None] if is_masked else None

    found = single_query_attention(queries, held_keys, held_values, scale=0.3, mask=mask)

    expected = mx.fast.scaled_dot_product_attention(queries, held_keys, held_values, scale=0.3, mask=mask)
    assert mx.allclose(found, expected, rtol=1e-4, atol=1e-5)
    if is_masked:
        hidden = mx.where(mask.swapaxes(2, 3), held_values, 1e6)
        assert mx.array_equal(found, single_query_attention(queries, held_keys, hidden, scale=0.3, mask=mask))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_only_float32_has_forms_of_its_own(dtype):
    """Half-precision queries keep MLX's kernel, which adds up in float32."""
    queries = mx.random.normal((2, 4, 1, 8), key=mx.random.key(0)).astype(dtype)
    assert not prefers_own_forms(queries)
    keys = mx.random.normal((2, 2, 9, 8), key=mx.random.key(1)).astype(dtype)
    kernel = mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.3)
    assert mx.array_equal(masked_attention(queries, keys, keys, scale=0.3, mask=None), kernel)
