"""Bytes foretold equal bytes allocated, without arrays."""

import subprocess
import sys

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvcache import (
    CacheSpec,
    InvalidGeometry,
    InvalidLength,
    KVCache,
    LayerSpec,
    RowBatch,
    kv_bytes_at,
    slot_kv_bytes_at,
)

LAYERS = st.builds(
    LayerSpec, num_kv_heads=st.integers(1, 3), key_head_dim=st.integers(1, 9), value_head_dim=st.integers(1, 9)
)


@settings(max_examples=25, deadline=None)
@given(LAYERS, st.integers(1, 3), st.integers(1, 1100), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_bytes_foretold_are_bytes_allocated(layer, num_layers, num_tokens, dtype):
    """`kv_bytes_at` is a lone row's caches, `slot_kv_bytes_at` the batch's buffers, exactly."""
    spec = CacheSpec(layers=(layer,) * num_layers, dtype=dtype)
    keys = mx.zeros((1, layer.num_kv_heads, num_tokens, layer.key_head_dim), getattr(mx, dtype))
    values = mx.zeros((1, layer.num_kv_heads, num_tokens, layer.value_head_dim), getattr(mx, dtype))
    lone, batch = [KVCache() for _ in range(num_layers)], RowBatch(num_layers, max_rows=4)
    slots = [batch.join(num_tokens=num_tokens) for _ in range(3)]
    for cache, view in zip(lone, batch.view(slots[2:], num_tokens), strict=True):
        cache.update_and_fetch(keys, values)
        view.attend(keys, keys, values, scale=1.0)
    assert sum(cache.nbytes for cache in lone) == kv_bytes_at(spec, num_tokens)
    assert batch.nbytes == slot_kv_bytes_at(spec, num_tokens, num_slots=4)


def test_nothing_costs_nothing():
    """A row without positions has no bytes."""
    spec = CacheSpec(layers=(LayerSpec(num_kv_heads=1, key_head_dim=1, value_head_dim=1),), dtype="float32")
    assert kv_bytes_at(spec, 0) == slot_kv_bytes_at(spec, 0) == 0


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_token_counts_are_checked(value):
    """A count is an integer of at least 0."""
    spec = CacheSpec(layers=(LayerSpec(num_kv_heads=1, key_head_dim=1, value_head_dim=1),), dtype="float32")
    with pytest.raises(InvalidLength):
        kv_bytes_at(spec, value)
    with pytest.raises(InvalidLength):
        slot_kv_bytes_at(spec, value)


@pytest.mark.parametrize("bad", [{"num_kv_heads": 0}, {"key_head_dim": 1.5}, {"value_head_dim": True}])
def test_layer_sizes_are_checked(bad):
    """The error names the field."""
    sizes = {"num_kv_heads": 1, "key_head_dim": 1, "value_head_dim": 1, **bad}
    with pytest.raises(InvalidGeometry, match=next(iter(bad))):
        LayerSpec(**sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        {"kind": "sliding", "num_kv_heads": 1, "key_head_dim": 1, "value_head_dim": 1},
        {"kind": "recurrent", "num_kv_heads": 1},
        {"kind": "recurrent", "tail_elements": -1},
        {"kind": "recurrent", "state_elements": True},
        {"kind": "shared", "window": 4},
        {"kind": "list"},
        {"kind": "round"},
        {"num_kv_heads": 1, "key_head_dim": 1, "value_head_dim": 1, "tail_elements": 3},
        {"num_kv_heads": 1, "key_head_dim": 1, "value_head_dim": 1, "members": (LayerSpec.shared(),)},
    ],
    ids=str,
)
def test_a_kind_takes_exactly_its_sizes(sizes):
    """A size that is missing, or that the kind does not have, is refused."""
    with pytest.raises(InvalidGeometry):
        LayerSpec(**sizes)


@given(st.integers(1, 2000), st.integers(1, 600))
def test_bounded_layers_stop_growing(num_tokens, window):
    """A ring never holds more than its window, a chunked layer never more than its chunk and two part slabs."""
    sizes = {"num_kv_heads": 1, "key_head_dim": 1, "value_head_dim": 1}
    ring, chunked = LayerSpec.sliding(window=window, **sizes), LayerSpec.chunked(chunk_size=window, **sizes)
    assert min(num_tokens, window) <= ring.columns_at(num_tokens) <= window
    assert min(num_tokens, window) <= chunked.columns_at(num_tokens) < window + 512


def test_a_spec_needs_layers_and_a_known_element_type():
    """No layer or an unknown dtype is refused."""
    layer = LayerSpec(num_kv_heads=1, key_head_dim=1, value_head_dim=1)
    with pytest.raises(InvalidGeometry, match="layers"):
        CacheSpec(layers=(), dtype="float32")
    with pytest.raises(InvalidGeometry, match="int8"):
        CacheSpec(layers=(layer,), dtype="int8")


def test_budgets_import_no_arrays():
    """The root and `spec` load without mlx, and every public name resolves."""
    code = (
        "import sys, headrace_kvcache as k; k.kv_bytes_at; k.CacheSpec; assert 'mlx' not in sys.modules; "
        "assert dir(k) == k.__all__ == sorted(k.__all__); [getattr(k, name) for name in k.__all__]"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True)
