"""Laws of the TurboQuant codec: bytes, bounds of its error, groups that hardly vary, and its centroids."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvcache import (
    CacheSpec,
    InvalidGeometry,
    InvalidScheme,
    KVCache,
    KVScheme,
    LayerSpec,
    QuantizedKVCache,
    RotatingKVCache,
    TurboQuantKVCache,
    attend,
    make_prompt_cache,
)
from headrace_kvcache.bits import pack_bits, unpack_bits
from headrace_kvcache.centroids import boundaries, centroids
from headrace_kvcache.turbo import decode_keys, encode_keys, rotate, rotate_back

KEY_BITS, VALUE_BITS, SIZES = (2, 4, 5, 8), (2, 3, 4, 5, 8), (64, 128, 256, 512)


def normal(shape, seed=0):
    return mx.random.normal(shape, key=mx.random.key(seed))


@given(st.sampled_from([2, 3, 4, 5, 8]), st.integers(1, 4), st.integers(0, 1000))
def test_a_stream_gives_back_what_was_packed(bits, num_groups, seed):
    """Packing loses nothing, takes exactly its bits, and is the little-endian stream of the integers."""
    indices = mx.random.randint(0, 1 << bits, (2, 32 * num_groups), mx.uint32, key=mx.random.key(seed))
    words = pack_bits(indices, bits)
    assert words.shape == (2, num_groups * bits)
    assert mx.array_equal(unpack_bits(words, bits), indices)
    number = sum(value << (place * bits) for place, value in enumerate(indices[0].tolist()))
    stream = b"".join(word.to_bytes(4, "little") for word in words[0].tolist())
    assert int.from_bytes(stream, "little") == number


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_centroids_are_those_of_lloyd_and_max(bits):
    """Each centroid is the mean of a standard normal over its cell; the cells meet halfway."""
    found, edges = centroids(bits), (-math.inf, *boundaries(bits), math.inf)
    assert len(found) == 1 << bits
    assert list(found) == sorted(found)

    def density(x):
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    for centroid, low, high in zip(found, edges[:-1], edges[1:], strict=True):
        mass = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
        assert abs((density(low) - density(high)) / mass - centroid) < 2e-4
    if bits == 3:
        assert found[4:] == pytest.approx((0.24509, 0.75601, 1.34391, 2.15195), abs=1e-5)
        assert boundaries(3)[3:] == pytest.approx((0, 0.50055, 1.04996, 1.74793), abs=2e-5)


@pytest.mark.parametrize("size", SIZES)
def test_the_rotation_is_undone_and_keeps_lengths(size):
    """Fixed signs and a Walsh-Hadamard transform: an isometry, and its own inverse up to the signs."""
    values = normal((3, size))
    rotated = rotate(values)
    assert mx.abs(rotate_back(rotated) - values).max().item() < 1e-5
    assert mx.abs((rotated**2).sum(axis=-1) - (values**2).sum(axis=-1)).max().item() < 1e-3 * size
    spike = rotate(mx.zeros((1, size)).at[0, 5].add(1.0))
    assert mx.abs(spike).max().item() == pytest.approx(size**-0.5, rel=1e-5), "a spike is spread evenly"


@settings(deadline=None)
@given(
    bits=st.sampled_from(KEY_BITS),
    middle=st.sampled_from([0.0, 1e-9, 1e-3, 1.0, -7.0, 1e3, 6e4]),
    width=st.sampled_from([0.0, 1e-9, 1e-4, 1.0, 100.0]),
)
def test_keys_stay_within_a_step_also_in_groups_that_hardly_vary(bits, middle, width):
    """The error is at most a step and float16's own rounding, and never infinite: constant groups are guarded."""
    keys = middle + width * (mx.random.uniform(shape=(4, 64), key=mx.random.key(1)) - 0.5)
    fields = encode_keys(keys, bits)
    assert all(bool(mx.isfinite(field.astype(mx.float32)).all()) for field in fields)
    groups = np.array(keys, np.float64).reshape(4, 2, 32)
    steps = np.ptp(groups, axis=-1, keepdims=True) / (254 if bits == 8 else (1 << bits) - 1)
    floor = np.abs(groups).max(axis=-1, keepdims=True) / 1700 + 2.0**-24
    error = np.abs(np.array(decode_keys(fields, bits), np.float64).reshape(4, 2, 32) - groups)
    assert (error <= np.maximum(steps, floor) * 1.01).all()


def test_zeros_stay_zeros():
    """Padding and blank buffers decode to nothing."""
    cache = TurboQuantKVCache()
    cache.update_and_fetch(*[mx.zeros((1, 1, 2, 64))] * 2)
    assert all(not held.any().item() for held in cache.keys_and_values())


@pytest.mark.parametrize(("key_bits", "value_bits"), [(8, 3), (2, 2), (4, 4), (5, 5), (8, 8)])
@pytest.mark.parametrize("size", [64, 128])
def test_bytes_are_those_foretold_and_more_bits_err_less(key_bits, value_bits, size):
    """`bytes_at` is what the cache takes: at 128 and k8v3, 200 bytes a token and head where float16 takes 512."""
    layer = LayerSpec.full(num_kv_heads=2, key_head_dim=size, value_head_dim=size)
    spec, scheme = CacheSpec(layers=[layer], dtype="float32"), KVScheme.turbo(key_bits, value_bits)
    cache = TurboQuantKVCache(key_bits=key_bits, value_bits=value_bits)
    keys, values = normal((1, 2, 300, size), 1), normal((1, 2, 300, size), 2)
    held_keys, held_values = cache.update_and_fetch(keys, values)
    assert cache.nbytes == scheme.bytes_at(spec, 300)
    if (size, key_bits, value_bits) == (128, 8, 3):
        assert cache.nbytes == 512 * 2 * 200
    spread = {2: 0.6, 4: 0.12, 5: 0.06, 8: 0.008}[key_bits]
    assert mx.abs(held_keys - keys).mean().item() < spread
    # The mean square error of the Lloyd-Max quantizer of a normal distribution.
    expected = {2: 0.1175, 3: 0.03455, 4: 0.0095, 5: 0.0025, 8: 0.0001}[value_bits]
    assert ((held_values - values) ** 2).mean().item() < expected * 1.25


def test_a_scheme_converts_full_layers_alone():
    """Sliding layers stay as they are; the converted cache attends as one that was always stored so."""
    chunk = [normal((1, heads, 20, 64), heads) for heads in (4, 2, 2)]
    step = [one[:, :, :1] for one in chunk]
    caches = [KVCache(), RotatingKVCache(8)]
    for cache in caches:
        attend(cache, *chunk, scale=0.1)
    always = TurboQuantKVCache()
    attend(always, *chunk, scale=0.1)
    [itself, _] = made = make_prompt_cache(Two(), scheme=KVScheme.turbo())
    attend(itself, *chunk, scale=0.1)
    assert KVScheme.turbo().convert(caches) == 1
    assert [type(cache) for cache in caches] == [TurboQuantKVCache, RotatingKVCache]
    wanted = attend(always, *step, scale=0.1)
    assert mx.array_equal(attend(caches[0], *step, scale=0.1), wanted)
    assert mx.array_equal(attend(itself, *step, scale=0.1), wanted)
    assert isinstance(made[1], RotatingKVCache)


class Two:
    """A model with a full and a sliding layer."""

    def make_cache(self):
        return [KVCache(), RotatingKVCache(8)]


def test_what_cannot_be_rotated_is_refused():
    """Head sizes at start-up and at the first append, another dtype later, bits that do not exist."""
    spec = CacheSpec(layers=[LayerSpec.full(num_kv_heads=1, key_head_dim=96, value_head_dim=64)], dtype="float32")
    with pytest.raises(InvalidScheme, match="key head size 96"):
        KVScheme.turbo().check(spec)
    cache = TurboQuantKVCache()
    with pytest.raises(InvalidGeometry, match="96"):
        cache.update_and_fetch(mx.ones((1, 1, 1, 96)), mx.ones((1, 1, 1, 64)))
    assert cache.empty()
    cache.update_and_fetch(*[mx.ones((1, 1, 1, 64))] * 2)
    with pytest.raises(InvalidGeometry, match="bfloat16"):
        cache.update_and_fetch(*[mx.ones((1, 1, 1, 64), mx.bfloat16)] * 2)
    for bits in ((3, 3), (8, 6), (8, True)):
        with pytest.raises(InvalidScheme):
            KVScheme.turbo(*bits)


def test_turbo_errs_less_than_affine_values_of_as_many_bits():
    """Rotated 3-bit values are closer than affine ones of 3 bits where one element dwarfs its group."""
    values = normal((1, 1, 64, 128), 3)
    values[..., 7] = 40.0
    turbo, affine = TurboQuantKVCache(key_bits=8, value_bits=3), QuantizedKVCache(bits=3, group_size=64)
    errors = [((cache.update_and_fetch(values, values)[1] - values) ** 2).mean().item() for cache in (turbo, affine)]
    assert errors[0] < errors[1]
