"""Cache files of Headrace in mlx-lm's reader, and of mlx-lm's writer in Headrace's."""

import mlx.core as mx
import pytest
from mlx_lm.models import cache as theirs

from headrace_kvcache import (
    CacheFileError,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RecurrentCache,
    RotatingKVCache,
    TurboQuantKVCache,
    load_caches,
    save_caches,
)

PAIRS = {
    "plain": (KVCache, theirs.KVCache),
    "quantized": (
        lambda: QuantizedKVCache(bits=4, group_size=32),
        lambda: theirs.QuantizedKVCache(group_size=32, bits=4),
    ),
    "ring": (lambda: RotatingKVCache(6), lambda: theirs.RotatingKVCache(6)),
    "keeping ring": (lambda: RotatingKVCache(6, 2), lambda: theirs.RotatingKVCache(6, 2)),
    "chunked": (lambda: ChunkedKVCache(8), lambda: theirs.ChunkedKVCache(8)),
    "list": (
        lambda: CacheList(KVCache(), RotatingKVCache(4)),
        lambda: theirs.CacheList(theirs.KVCache(), theirs.RotatingKVCache(4)),
    ),
}


def feed(cache, num_tokens, seed):
    parts = getattr(cache, "caches", None)
    if parts is not None:
        return [each for part in parts for each in feed(part, num_tokens, seed)]
    keys, values = (mx.random.normal((1, 2, num_tokens, 32), key=each) for each in mx.random.split(mx.random.key(seed)))
    found = cache.update_and_fetch(keys, values)
    if isinstance(found[0], mx.array):
        return list(found)
    return [mx.dequantize(*side, group_size=cache.group_size, bits=cache.bits) for side in found]


def state_arrays(cache):
    """A recurrent cache's arrays, by either's name."""
    return [cache[index] for index in range(2)]


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("chunks", [(), (3,), (3, 1, 1, 1, 1, 1), (9,), (4, 5, 1)])
def test_either_reads_the_others_files(kind, chunks, tmp_path):
    """Law: what one side saved, the other loads and goes on with as the side that saved it does."""
    make_own, make_their = PAIRS[kind]
    own, their = make_own(), make_their()
    for seed, num_tokens in enumerate(chunks):
        feed(own, num_tokens, seed)
        feed(their, num_tokens, seed)
    save_caches(tmp_path / "own.safetensors", [own], metadata={"model": "m"})
    (read_there,), metadata = theirs.load_prompt_cache(str(tmp_path / "own.safetensors"), return_metadata=True)
    assert type(read_there) is type(their)
    assert metadata["model"] == "m"
    theirs.save_prompt_cache(str(tmp_path / "their.safetensors"), [their], {"model": "t"})
    saved = load_caches(tmp_path / "their.safetensors", allow_unchecked=True)
    assert saved.metadata == {"model": "t"}
    (read_here,) = saved.caches
    assert type(read_here) is type(own)
    for seed in (20, 21):
        from_own = feed(own, 1, seed)
        assert all(map(mx.array_equal, from_own, feed(read_here, 1, seed)))
        from_their = feed(their, 1, seed)
        assert all(map(mx.array_equal, from_their, feed(read_there, 1, seed)))


def test_either_reads_the_others_recurrent_states(tmp_path):
    """Law: arrays of recurrent layers pass both ways; positions, which mlx-lm does not know, stay with Headrace."""
    own, their = RecurrentCache(2), theirs.ArraysCache(2)
    for cache in (own, their):
        cache[0], cache[1] = mx.arange(6.0).reshape(1, 2, 3), mx.ones((1, 2, 2, 2))
    own.advance(7)
    save_caches(tmp_path / "own.safetensors", [own])
    theirs.save_prompt_cache(str(tmp_path / "their.safetensors"), [their])
    (there,) = theirs.load_prompt_cache(str(tmp_path / "own.safetensors"))
    (here,) = load_caches(tmp_path / "their.safetensors", allow_unchecked=True).caches
    (back,) = load_caches(tmp_path / "own.safetensors").caches
    assert type(there) is theirs.ArraysCache
    for cache in (there, here, back):
        assert all(map(mx.array_equal, state_arrays(cache), state_arrays(own)))
    assert (here.offset, back.offset) == (0, 7)


def test_mlx_lms_caches_can_be_saved(tmp_path):
    """Law: caches of mlx-lm's own classes are saved as they are, and come back as their twins."""
    caches = [make_their() for _, make_their in PAIRS.values()]
    for cache in caches:
        feed(cache, 5, 0)
    save_caches(tmp_path / "c.safetensors", caches)
    for cache, loaded in zip(caches, load_caches(tmp_path / "c.safetensors").caches, strict=True):
        assert all(map(mx.array_equal, feed(cache, 1, 1), feed(loaded, 1, 1)))


def test_files_without_a_checksum_are_taken_on_request_alone(tmp_path):
    """Law: mlx-lm's files are refused unless asked for, and Headrace's own kinds are refused by mlx-lm."""
    theirs.save_prompt_cache(str(tmp_path / "c.safetensors"), [theirs.KVCache()])
    with pytest.raises(CacheFileError, match="allow_unchecked"):
        load_caches(tmp_path / "c.safetensors")
    save_caches(tmp_path / "turbo.safetensors", [TurboQuantKVCache()])
    with pytest.raises(KeyError, match="TurboQuantKVCache"):
        theirs.load_prompt_cache(str(tmp_path / "turbo.safetensors"))
