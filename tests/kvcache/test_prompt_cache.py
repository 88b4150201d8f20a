"""Laws of the caches made for a model, and of those that convert themselves."""

import copy

import mlx.core as mx
import pytest

from headrace_kvcache import (
    CacheList,
    ChunkedKVCache,
    EmptyCache,
    InvalidLength,
    InvalidScheme,
    KVCache,
    KVScheme,
    QuantizedKVCache,
    RecurrentCache,
    RotatingKVCache,
    RotatingQuantizedKVCache,
    UnsupportedCache,
    attend,
    cache_spec_of,
    make_prompt_cache,
)


class Model:
    """A model that makes given caches."""

    def __init__(self, *caches):
        self._caches = caches

    def make_cache(self):
        return list(self._caches)


class Layered:
    """A model that has layers and no caches of its own."""

    layers = [None] * 3


def arrays(count, seed=0, size=64):
    shapes = [(1, 4, count, size), (1, 2, count, size), (1, 2, count, size)]
    return [mx.random.normal(shape, key=mx.random.key(seed + place)) for place, shape in enumerate(shapes)]


def test_a_model_without_caches_of_its_own_gets_plain_ones():
    """One per layer; a bound makes rings that keep four tokens."""
    assert [type(cache) for cache in make_prompt_cache(Layered())] == [KVCache] * 3
    rings = make_prompt_cache(Layered(), max_kv_size=32)
    assert [(type(ring), ring.max_size, ring.keep) for ring in rings] == [(RotatingKVCache, 32, 4)] * 3


def test_caches_of_this_package_are_taken_as_they_are():
    """A native model's caches are handed through, one object each; a bound concerns plain ones alone."""
    made = [KVCache(), RotatingKVCache(9), ChunkedKVCache(9), RecurrentCache(), CacheList(KVCache())]
    assert all(one is other for one, other in zip(make_prompt_cache(Model(*made)), made, strict=True))
    bounded = make_prompt_cache(Model(*made), max_kv_size=32)
    assert [type(one) for one in bounded] == [RotatingKVCache, *[type(one) for one in made[1:]]]
    for size in (4, -1, 9.0, True):
        with pytest.raises(InvalidLength, match="max_kv_size"):
            make_prompt_cache(Layered(), max_kv_size=size)
    with pytest.raises(UnsupportedCache, match="neither"):
        make_prompt_cache(object())
    with pytest.raises(UnsupportedCache, match=r"layer 1 has a builtins\.object"):
        make_prompt_cache(Model(KVCache(), object()))


@pytest.mark.parametrize(
    ("make", "twin"),
    [
        (KVCache, lambda: QuantizedKVCache(bits=4, group_size=32)),
        (lambda: RotatingKVCache(20, 3), lambda: RotatingQuantizedKVCache(20, 3, bits=4, group_size=32)),
    ],
    ids=["plain", "ring"],
)
def test_caches_with_a_scheme_convert_after_their_first_chunk(make, twin):
    """The first chunk is attended as it comes, all later ones as if everything had always been quantized."""
    [cache] = make_prompt_cache(Model(make()), scheme=KVScheme.uniform(4, 32))
    plain, quantized = make(), twin()
    assert (cache.empty(), cache.offset, cache.size(), cache.nbytes, cache.is_trimmable()) == (True, 0, 0, 0, True)
    first = arrays(30)
    assert mx.array_equal(attend(cache, *first, scale=0.1), attend(plain, *first, scale=0.1))
    quantized.update_and_fetch(*first[1:])
    assert isinstance(cache.cache, type(plain))
    assert attend(cache, first[0], None, None, scale=0.1).shape == first[0].shape
    for count in (1, 5, 1):
        step = arrays(count, count)
        assert cache.make_mask(count, return_array=True) is None or cache.make_mask(count, return_array=True).shape
        assert mx.abs(attend(cache, *step, scale=0.1) - attend(quantized, *step, scale=0.1)).max().item() < 1e-5
        assert (cache.offset, cache.size()) == (quantized.offset, quantized.size())
    assert type(cache.cache) is type(quantized)
    assert cache.nbytes == quantized.nbytes
    twin_cache = copy.deepcopy(cache)
    step = arrays(2, 9)[1:]
    for one, other in zip(cache.update_and_fetch(*step), twin_cache.update_and_fetch(*step), strict=True):
        assert mx.array_equal(one, other)
    assert len(cache.state) >= 5
    assert cache.keys_and_values()[0].shape[1] == 2
    assert not hasattr(cache, "bits")


def test_a_start_delays_the_conversion():
    """Below `start` positions the cache stays as it is; trimming goes to the cache of the moment."""
    [cache] = make_prompt_cache(Model(KVCache()), scheme=KVScheme.uniform(8, 32, start=5))
    for count, kind in ((2, KVCache), (3, KVCache), (1, QuantizedKVCache)):
        cache.update_and_fetch(*arrays(count)[1:])
        assert type(cache.cache) is kind
    assert (cache.trim(2), cache.offset) == (2, 4)
    cache.keys, cache.values = cache.keys, cache.values
    assert cache.offset == 4


def test_a_scheme_that_does_not_fit_is_refused_as_early_as_it_can_be_seen():
    """By the layer's kind when the caches are made, by its head size before the first append."""
    for layer, cache in ((0, RecurrentCache()), (3, KVCache())):
        with pytest.raises(InvalidScheme) as refusal:
            make_prompt_cache(Model(cache), scheme=KVScheme.per_layer([(layer, 4, 32)]))
        assert refusal.value.layer == layer
    [cache] = make_prompt_cache(Model(KVCache()), scheme=KVScheme.uniform(4, 64))
    with pytest.raises(InvalidScheme, match="48"):
        attend(cache, *arrays(3, size=48), scale=1.0)
    assert cache.empty()


def test_geometry_is_read_off_used_caches_only():
    """Empty caches have none yet, quantized ones do not tell."""
    with pytest.raises(EmptyCache):
        cache_spec_of([KVCache()])
    quantized = QuantizedKVCache(bits=4, group_size=32)
    quantized.update_and_fetch(*arrays(2)[1:])
    with pytest.raises(UnsupportedCache, match="QuantizedKVCache"):
        cache_spec_of([quantized])
    odd = KVCache()
    odd.update_and_fetch(*[mx.ones((1, 1, 1, 4), mx.int32)] * 2)
    with pytest.raises(UnsupportedCache, match="int32"):
        cache_spec_of([odd])
    recurrent, half = RecurrentCache(), KVCache()
    recurrent[0], recurrent[1] = mx.ones((1, 3), mx.bfloat16), mx.ones((1, 5))
    half.update_and_fetch(*[mx.ones((1, 1, 1, 4), mx.bfloat16)] * 2)
    spec = cache_spec_of([recurrent, CacheList(half)])
    assert (spec.dtype, spec.layers[0].tail_elements, spec.layers[0].state_elements) == ("bfloat16", 3, 5)
