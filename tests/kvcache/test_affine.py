"""Laws of affine quantization: token slices, bytes, attention over packed bits."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvcache import InvalidGeometry
from headrace_kvcache.affine import (
    BITS,
    concatenate_tokens,
    dequantize,
    quantize,
    quantized_attention,
    quantized_zeros,
    slice_tokens,
    triple_nbytes,
)

FORMATS = st.tuples(st.sampled_from(BITS), st.sampled_from([32, 64]))


def equal(left, right):
    return all(bool(mx.array_equal(one, other)) for one, other in zip(left, right, strict=True))


@settings(max_examples=20, deadline=None)
@given(FORMATS, st.integers(1, 40), st.data(), st.sampled_from([mx.float32, mx.bfloat16, mx.float16]))
def test_quantizing_commutes_with_slicing_tokens(form, num_tokens, data, dtype):
    """Quantize-then-slice equals slice-then-quantize, and joining the slices gives the whole back."""
    bits, group_size = form
    cut = data.draw(st.integers(0, num_tokens))
    array = mx.random.normal((2, 2, num_tokens, 64), key=mx.random.key(num_tokens)).astype(dtype)
    whole = quantize(array, bits=bits, group_size=group_size)
    parts = [slice_tokens(whole, 0, cut), slice_tokens(whole, cut, num_tokens)]

    for part, tokens in zip(parts, (array[..., :cut, :], array[..., cut:, :]), strict=True):
        if tokens.size:
            assert equal(part, quantize(tokens, bits=bits, group_size=group_size))
    assert equal(concatenate_tokens(parts), whole)


@given(FORMATS, st.sampled_from([mx.float32, mx.bfloat16]))
def test_zeros_have_the_form_of_a_quantized_array(form, dtype):
    """Empty buffers have the shapes, dtypes and bytes that `quantize` gives."""
    bits, group_size = form
    made = quantized_zeros((1, 2, 5, 128), dtype, bits=bits, group_size=group_size)
    real = quantize(mx.zeros((1, 2, 5, 128), dtype), bits=bits, group_size=group_size)
    assert [(part.shape, part.dtype) for part in made] == [(part.shape, part.dtype) for part in real]
    assert triple_nbytes(made) == triple_nbytes(real) == 10 * (128 * bits // 8 + 2 * 128 // group_size * dtype.size)


def slow_attention(queries, keys, values, *, scale, mask, sinks, softcap):
    """Attention in float64, one query after the other."""
    queries, keys, values = (np.array(one.astype(mx.float32), np.float64) for one in (queries, keys, values))
    repeats = queries.shape[1] // keys.shape[1]
    out = np.zeros((*queries.shape[:3], values.shape[-1]))
    for row, head, position in np.ndindex(queries.shape[:3]):
        scores = keys[row, head // repeats] @ queries[row, head, position] * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        scores = np.where(mask[row, 0, position], scores, -np.inf)
        extra = [] if sinks is None else [sinks[head].item()]
        weights = np.exp(scores - max([scores.max(), *extra]))
        total = weights.sum() + sum(np.exp(one - max([scores.max(), *extra])) for one in extra)
        out[row, head, position] = weights @ values[row, head // repeats] / total
    return out


@settings(max_examples=25, deadline=None)
@given(
    form=FORMATS,
    num_columns=st.sampled_from([1, 5, 256, 700, 1500]),
    num_queries=st.sampled_from([1, 2, 9]),
    kind=st.sampled_from(["none", "causal", "array"]),
    has_sinks=st.booleans(),
    softcap=st.sampled_from([None, 5.0]),
    dtype=st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
)
def test_attention_over_packed_bits_is_attention_over_what_they_stand_for(
    form, num_columns, num_queries, kind, has_sinks, softcap, dtype
):
    """Every tiling, mask, sink and soft cap equals float64 attention over the dequantized arrays."""
    bits, group_size = form
    num_queries = min(num_queries, num_columns)
    key = mx.random.split(mx.random.key(num_columns * 10 + num_queries), 5)
    queries = mx.random.normal((2, 4, num_queries, 64), key=key[0]).astype(dtype)
    triples = [
        quantize(mx.random.normal((2, 2, num_columns, 64), key=one).astype(dtype), bits=bits, group_size=group_size)
        for one in key[1:3]
    ]
    causal = mx.arange(num_columns) <= mx.arange(num_columns - num_queries, num_columns)[:, None]
    some = (mx.random.uniform(shape=(2, 1, num_queries, num_columns), key=key[3]) < 0.3) & causal
    some[..., 0] = True
    given_mask, seen = {"none": (None, mx.ones_like(some)), "causal": ("causal", causal), "array": (some, some)}[kind]
    sinks = mx.random.normal((4,), key=key[4]).astype(dtype) if has_sinks else None

    got = quantized_attention(
        queries, *triples, scale=0.2, mask=given_mask, bits=bits, group_size=group_size, sinks=sinks, softcap=softcap
    )

    held = [dequantize(triple, bits=bits, group_size=group_size) for triple in triples]
    seen = np.array(mx.broadcast_to(seen, some.shape))
    wanted = slow_attention(queries, *held, scale=0.2, mask=seen, sinks=sinks, softcap=softcap)
    assert got.dtype == dtype
    tolerance = {mx.float32: 2e-5, mx.float16: 1e-2, mx.bfloat16: 6e-2}[dtype]
    np.testing.assert_allclose(np.array(got.astype(mx.float32)), wanted, atol=tolerance)


def test_a_query_that_sees_nothing_gets_zeros():
    """A fully masked row is no NaN, so padding cannot poison a batch."""
    triple = quantize(mx.ones((1, 1, 300, 32)), bits=4, group_size=32)
    mask = mx.zeros((1, 1, 2, 300), mx.bool_)
    mask[..., 1, 299] = True
    out = quantized_attention(mx.ones((1, 1, 2, 32)), triple, triple, scale=1.0, mask=mask, bits=4, group_size=32)
    assert out[0, 0].tolist() == [[0.0] * 32, [1.0] * 32]


@pytest.mark.parametrize(("bits", "group_size", "size"), [(7, 64, 64), (True, 64, 64), (4, 48, 64), (4, 64, 96)])
def test_formats_that_mlx_does_not_pack_are_refused(bits, group_size, size):
    """The error names the value before MLX sees it."""
    with pytest.raises(InvalidGeometry):
        quantize(mx.ones((1, size)), bits=bits, group_size=group_size)
