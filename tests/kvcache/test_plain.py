"""Laws of the single-row cache."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvcache import CacheSpec, EmptyCache, InvalidGeometry, InvalidLength, KVCache, LayerSpec, kv_bytes_at

SPEC = CacheSpec(layers=(LayerSpec(num_kv_heads=2, key_head_dim=4, value_head_dim=3),), dtype="float32")


def positions(start, count, size):
    return mx.broadcast_to(mx.arange(start, start + count, dtype=mx.float32)[None, None, :, None], (1, 2, count, size))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([1, 2, 255, 256, 257, 600]), st.floats(0, 1)), min_size=1, max_size=6))
def test_appends_and_trims_keep_exactly_what_was_kept(rounds):
    """After any appends and trims the cache holds positions 0 .. offset, in buffers of whole slabs."""
    cache, longest = KVCache(), 0
    for count, share in rounds:
        start = cache.offset
        cache.update_and_fetch(positions(start, count, 4), positions(start, count, 3))
        longest = max(longest, cache.offset)
        trimmed = int(cache.offset * share)
        assert cache.trim(trimmed) == trimmed
        held_keys, held_values = cache.keys_and_values()
        assert held_keys.shape == (1, 2, cache.offset, 4)
        assert held_values.shape == (1, 2, cache.offset, 3)
        assert held_values[0, 1, :, 2].tolist() == list(range(cache.offset))
        assert cache.nbytes == kv_bytes_at(SPEC, longest)


def test_capacity_depends_on_the_offset_alone():
    """257 rows and then a chunk of 2,048 hold ceil(2305 / 256) slabs (ruling K-30a)."""
    cache = KVCache()
    cache.update_and_fetch(positions(0, 257, 4), positions(0, 257, 3))
    cache.update_and_fetch(positions(257, 2048, 4), positions(257, 2048, 3))
    assert cache.nbytes == kv_bytes_at(SPEC, 2305)
    assert cache.keys.shape[2] == 2560


def test_a_fresh_cache_holds_nothing():
    """Making caches to probe a model is free."""
    cache = KVCache()
    assert (cache.empty(), cache.size(), cache.nbytes, cache.is_trimmable()) == (True, 0, 0, True)
    assert cache.state == (None, None, 0)
    assert cache.trim(5) == 0
    with pytest.raises(EmptyCache):
        cache.keys_and_values()


def test_a_cache_made_from_a_state_goes_its_own_way():
    """Writes to either side stay invisible to the other."""
    cache = KVCache()
    cache.update_and_fetch(positions(0, 3, 4), positions(0, 3, 3))
    twin = KVCache.from_state(cache.state)
    cache.update_and_fetch(positions(3, 1, 4), positions(3, 1, 3))
    twin.update_and_fetch(positions(70, 1, 4), positions(70, 1, 3))
    assert cache.keys_and_values()[0][0, 0, :, 0].tolist() == [0, 1, 2, 3]
    assert twin.keys_and_values()[0][0, 0, :, 0].tolist() == [0, 1, 2, 70]


def test_masks_have_the_form_that_mlx_models_ask_for():
    """None for one position, "causal" for several, an array when asked or windowed."""
    cache = KVCache()
    cache.update_and_fetch(positions(0, 2, 4), positions(0, 2, 3))
    assert cache.make_mask(1) is None
    assert cache.make_mask(1, return_array=True) is None
    assert cache.make_mask(3) == "causal"
    assert cache.make_mask(2, return_array=True).tolist() == [[True, True, True, False], [True] * 4]
    assert cache.make_mask(2, window_size=2).tolist() == [[False, True, True, False], [False, False, True, True]]


@pytest.mark.parametrize("shape", [(2, 2, 1, 4), (1, 1, 1, 4), (1, 2, 1, 5)])
def test_other_rows_heads_or_sizes_are_refused(shape):
    """The error comes before any change."""
    cache = KVCache()
    cache.update_and_fetch(positions(0, 2, 4), positions(0, 2, 3))
    with pytest.raises(InvalidGeometry):
        cache.update_and_fetch(mx.ones(shape), mx.ones((*shape[:3], 3)))
    assert cache.offset == 2


@pytest.mark.parametrize("value", [-1, 1.0, True])
def test_trim_takes_a_count(value):
    """A count is an integer of at least 0."""
    with pytest.raises(InvalidLength):
        KVCache().trim(value)
