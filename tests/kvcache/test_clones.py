"""Laws of clones, trims and stored prefixes for every kind of single-row cache, own and mlx-lm's."""

import gc
import weakref

import mlx.core as mx
import pytest
from mlx_lm.models import cache as theirs

from headrace_kvcache import (
    CacheList,
    ChunkedKVCache,
    InvalidLength,
    InvalidPrefix,
    KVCache,
    KVScheme,
    NotTrimmable,
    PrefixCache,
    PrefixNamespace,
    QuantizedKVCache,
    RecurrentCache,
    RotatingKVCache,
    RotatingQuantizedKVCache,
    RowBatch,
    TurboQuantKVCache,
    UnsupportedCache,
    attend,
    can_trim_to,
    clone_caches,
    make_prompt_cache,
    trim_to,
)

HEADS, SIZE, LENGTH = 2, 64, 40
NAMESPACE = PrefixNamespace("test")


def arrays(dtype, num_tokens=96):
    keys = mx.random.split(mx.random.key(7), 2)
    return [mx.random.normal((1, HEADS, num_tokens, SIZE), key=key).astype(dtype) for key in keys]


def converting(scheme):
    class Layers:
        layers = (0,)

    return make_prompt_cache(Layers(), scheme=scheme)


# How the caches are made, and the fewest positions that they can be trimmed to from LENGTH; None: see `least_of`.
KINDS = {
    "plain": (lambda: [KVCache()], 0),
    "quantized 4": (lambda: [QuantizedKVCache(bits=4, group_size=32)], 0),
    "quantized 8": (lambda: [QuantizedKVCache(bits=8, group_size=64)], 0),
    "turbo": (lambda: [TurboQuantKVCache(key_bits=8, value_bits=3)], 0),
    "converting": (lambda: converting(KVScheme.uniform(8)), 0),
    "converting late": (lambda: converting(KVScheme.uniform(4, start=300)), 0),
    "ring": (lambda: [RotatingKVCache(64)], 0),
    "full ring": (lambda: [RotatingKVCache(24)], LENGTH),
    "full ring with sinks": (lambda: [RotatingKVCache(24, 4)], LENGTH),
    "quantized ring": (lambda: [RotatingQuantizedKVCache(64, 3, bits=8)], 0),
    "full quantized ring": (lambda: [RotatingQuantizedKVCache(24, bits=4, group_size=32)], LENGTH),
    "chunked": (lambda: [ChunkedKVCache(64)], 0),
    "chunked without its front": (lambda: [ChunkedKVCache(12)], None),
    "recurrent": (lambda: [RecurrentCache(2)], LENGTH),
    "several": (lambda: [CacheList(KVCache(), QuantizedKVCache(bits=8)), KVCache()], 0),
    "several with a full ring": (lambda: [CacheList(KVCache(), RotatingKVCache(24)), KVCache()], LENGTH),
    "several with a chunk": (lambda: [CacheList(ChunkedKVCache(12), KVCache()), KVCache()], None),
    "several with a state": (lambda: [CacheList(RecurrentCache(2), KVCache())], LENGTH),
    "mlx-lm's plain": (lambda: [theirs.KVCache()], 0),
    "mlx-lm's quantized": (lambda: [theirs.QuantizedKVCache(group_size=32, bits=4)], 0),
    "mlx-lm's ring": (lambda: [theirs.RotatingKVCache(64, keep=4)], 0),
    "mlx-lm's full ring": (lambda: [theirs.RotatingKVCache(24)], LENGTH),
    "mlx-lm's chunked": (lambda: [theirs.ChunkedKVCache(64)], 0),
    "mlx-lm's chunked without its front": (lambda: [theirs.ChunkedKVCache(12)], None),
    "mlx-lm's states": (lambda: [theirs.ArraysCache(2), theirs.KVCache()], LENGTH),
    "mlx-lm's several": (lambda: [theirs.CacheList(theirs.KVCache(), theirs.KVCache())], 0),
    "mlx-lm's concatenating": (lambda: [theirs.ConcatenateKVCache()], LENGTH),
}
TRIMMABLE = [kind for kind, (_, least) in KINDS.items() if least != LENGTH]
CHUNKS = {"at once": (LENGTH,), "in parts": (25, 10, 5), "one by one": (30, *[1] * (LENGTH - 30))}
DTYPES = [mx.float32, mx.bfloat16]


def least_of(kind, chunks):
    """The fewest positions: a chunk of 12 is whole if the front that went before the last append lies before it."""
    least = KINDS[kind][1]
    return least if least is not None else -(-max(0, LENGTH - chunks[-1] - 12) // 12) * 12


def feed(cache, keys, values):
    """Append as a model's layer does, and return what it sees or computes."""
    if isinstance(cache, CacheList | theirs.CacheList):
        return [array for part in cache.caches for array in feed(part, keys, values)]
    if isinstance(cache, RecurrentCache | theirs.ArraysCache):
        if cache[0] is None:
            cache[0], cache[1] = mx.zeros((1, HEADS, SIZE)), mx.zeros((1, 4))
        cache[0] = cache[0] * 0.5 + keys.sum(axis=2)
        # In place, as a convolution's tail may be written.
        cache[1][:, 1:3] = cache[1][:, 1:3] + keys[0, 0, -1, :2]
        cache.advance(keys.shape[2])
        return [cache[0], cache[1]]
    if isinstance(cache, ChunkedKVCache | theirs.ChunkedKVCache):
        cache.maybe_trim_front()
    if type(cache).__module__.startswith("mlx_lm"):
        seen = cache.update_and_fetch(keys, values)
        if isinstance(cache, theirs.ChunkedKVCache):
            # What its model's mask lets the last query see.
            columns = (cache.offset - 1) % cache.chunk_size + 1
            seen = [side[:, :, -columns:] for side in seen]
        return [part for side in seen for part in (side if isinstance(side, tuple | list) else [side])]
    return [attend(cache, keys, keys, values, scale=0.3)]


def feed_all(caches, data, start, stop):
    keys, values = data
    seen = [one for cache in caches for one in feed(cache, keys[:, :, start:stop], values[:, :, start:stop])]
    mx.eval(seen)
    return seen


def filled(kind, data, chunks):
    caches, at = KINDS[kind][0](), 0
    for chunk in chunks:
        feed_all(caches, data, at, at + chunk)
        at += chunk
    return caches


def assert_same(one, other, *, tolerance=0.0):
    for left, right in zip(one, other, strict=True):
        assert left.shape == right.shape
        gap = mx.abs(left.astype(mx.float32) - right.astype(mx.float32)).max().item()
        assert gap <= tolerance


def tolerance(dtype):
    """Attention over the columns of a ring in another order, as an entry at rest has them."""
    return {mx.float32: 2e-6, mx.bfloat16: 2e-2}[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_clones_and_their_origin_do_not_see_each_others_appends(kind, dtype):
    """Whoever goes on first, the other goes on as if it were alone; writes in place included."""
    data = arrays(dtype)
    expected = [feed_all(filled(kind, data, CHUNKS["in parts"]), data, LENGTH, LENGTH + size) for size in (1, 7)]
    for first in (0, 1):
        caches = filled(kind, data, CHUNKS["in parts"])
        sides = [caches, clone_caches(caches)]
        feed_all(sides[first], data, 60, 61)
        assert_same(feed_all(sides[1 - first], data, LENGTH, LENGTH + 1), expected[0])
        caches = filled(kind, data, CHUNKS["in parts"])
        sides = [clone_caches(caches), caches]
        feed_all(sides[first], data, 60, 96)
        assert_same(feed_all(sides[1 - first], data, LENGTH, LENGTH + 7), expected[1])


@pytest.mark.parametrize("kind", TRIMMABLE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_trimmed_clones_are_as_if_never_fed(kind, dtype):
    """trim_to(n) then append equals never having appended more than n; the origin keeps everything."""
    data, least = arrays(dtype), least_of(kind, CHUNKS["in parts"])
    caches = filled(kind, data, CHUNKS["in parts"])
    for length in {max(least, 3), 37}:
        clones = clone_caches(caches)
        trim_to(clones, length)
        assert_same(
            feed_all(clones, data, length, length + 2),
            feed_all(filled(kind, data, (length,)), data, length, length + 2),
        )
    assert can_trim_to(caches, LENGTH)
    assert_same(feed_all(caches, data, LENGTH, 48), feed_all(filled(kind, data, (LENGTH,)), data, LENGTH, 48))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_what_cannot_be_trimmed_says_so_and_stays(kind, chunks):
    """can_trim_to tells for every length whether trim_to works; a refusal changes nothing in any layer."""
    data, least = arrays(mx.float32), least_of(kind, chunks)
    caches = filled(kind, data, chunks)
    assert [can_trim_to(caches, length) for length in range(LENGTH + 2)] == [
        least <= length <= LENGTH for length in range(LENGTH + 2)
    ]
    if least:
        with pytest.raises(NotTrimmable, match=f"to {least}"):
            trim_to(caches, least - 1)
    for length in (-1, LENGTH + 1, 3.0):
        with pytest.raises(InvalidLength):
            trim_to(caches, length)
    trim_to(caches, LENGTH)
    assert_same(feed_all(caches, data, LENGTH, 48), feed_all(filled(kind, data, chunks), data, LENGTH, 48))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("chunks", "dtype"), [("in parts", mx.float32), ("in parts", mx.bfloat16), ("one by one", mx.bfloat16)]
)
def test_an_entry_and_its_hits_are_independent_of_everybody(kind, chunks, dtype):
    """After put, any use of the caller's caches leaves the entry unchanged and the reverse; hits do not meet either."""
    data, tokens, chunks = arrays(dtype), list(range(LENGTH)), CHUNKS[chunks]
    alone = filled(kind, data, chunks)
    expected = feed_all(alone, data, LENGTH, LENGTH + 3)
    store = PrefixCache(1 << 30)
    caches = filled(kind, data, chunks)
    assert store.put(tokens, caches, namespace=NAMESPACE)
    store.check_integrity()
    first = store.take([*tokens, 1], namespace=NAMESPACE)
    assert_same(feed_all(first.caches, data, LENGTH, LENGTH + 3), expected, tolerance=tolerance(dtype))
    assert_same(feed_all(caches, data, LENGTH, LENGTH + 3), expected)
    feed_all(caches, data, 50, 90)
    feed_all(first.caches, data, 70, 71)
    store.check_integrity()
    second = store.take([*tokens, 2], namespace=NAMESPACE)
    assert second.num_tokens == LENGTH
    assert_same(feed_all(second.caches, data, LENGTH, LENGTH + 3), expected, tolerance=tolerance(dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [CHUNKS["at once"], CHUNKS["one by one"]], ids=["at once", "one by one"])
def test_an_entry_serves_a_part_of_itself_or_nothing(kind, chunks):
    """A prompt that departs inside an entry gets the trimmed part as if that alone had been fed, or a counted miss."""
    data, least = arrays(mx.float32), least_of(kind, chunks)
    store = PrefixCache(1 << 30)
    tokens = list(range(LENGTH))
    store.put(tokens, filled(kind, data, chunks), namespace=NAMESPACE)
    prompt = [*tokens[:37], 99, 98]
    assert store.peek(prompt, namespace=NAMESPACE) == (37 if least <= 37 else 0)
    hit = store.take(prompt, namespace=NAMESPACE)
    if least > 37:
        assert hit is None
        assert store.stats().misses["not_trimmable"] == 1
        return
    assert hit.tokens == tuple(tokens[:37])
    assert_same(feed_all(hit.caches, data, 37, 40), feed_all(filled(kind, data, (37,)), data, 37, 40))
    again = store.take([*tokens, 5], namespace=NAMESPACE)
    assert_same(feed_all(again.caches, data, 40, 42), feed_all(filled(kind, data, (40,)), data, 40, 42))


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_is_what_the_caches_hold(kind):
    """Keys that are one token off are refused, whatever the kind; the store stays empty."""
    caches = filled(kind, arrays(mx.float32), CHUNKS["in parts"])
    store = PrefixCache(1 << 30)
    for length in (LENGTH - 1, LENGTH + 1):
        with pytest.raises(InvalidPrefix, match=f"holds {LENGTH} positions"):
            store.put(list(range(length)), caches, namespace=NAMESPACE)
    assert len(store) == 0


def test_states_that_know_no_length_are_believed_beside_a_cache_that_does():
    """A recurrent cache that was never advanced is taken at its neighbour's word, and refused alone."""
    store, tokens = PrefixCache(1 << 30), list(range(LENGTH))
    mute = RecurrentCache(1)
    mute[0] = mx.ones((1, 4))
    with pytest.raises(InvalidPrefix, match="none of the 1 caches"):
        store.put(tokens, [mute], namespace=NAMESPACE)
    with pytest.raises(InvalidPrefix, match="empty"):
        store.put(tokens, [], namespace=NAMESPACE)
    assert store.put(tokens, [mute, *filled("plain", arrays(mx.float32), (LENGTH,))], namespace=NAMESPACE)
    with pytest.raises(InvalidPrefix, match="layer 1"):
        store.put(tokens, [mute, KVCache()], namespace=NAMESPACE)
    plain, short = (
        filled("plain", arrays(mx.float32), (LENGTH,))[0],
        filled("plain", arrays(mx.float32), (LENGTH - 1,))[0],
    )
    with pytest.raises(InvalidPrefix, match="one layer"):
        store.put(tokens, [CacheList(plain, short)], namespace=NAMESPACE)


def test_what_is_no_single_row_cache_is_refused():
    """Batches and foreign objects are not cloned or stored by guess."""
    batch = theirs.BatchKVCache([0, 0])
    for cache in (batch, object(), mx.zeros(3)):
        with pytest.raises(UnsupportedCache):
            PrefixCache(1 << 30).put(list(range(40)), [cache], namespace=NAMESPACE)
    with pytest.raises(UnsupportedCache):
        clone_caches([object()])


def active_bytes():
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def test_an_entry_keeps_no_larger_buffer_alive():
    """Caches that are views of a large buffer are copied: what was billed is what stays when the buffer goes."""
    before = active_bytes()
    buffer = mx.random.normal((4, 1, 65536, SIZE))
    mx.eval(buffer)
    cut = buffer[1:2, :, :1000, :]
    store = PrefixCache(1 << 30)
    assert store.put(list(range(1000)), [KVCache.from_state((cut, cut[...], 1000))], namespace=NAMESPACE)
    del buffer, cut
    assert store.nbytes == 2 * 1000 * SIZE * 4
    assert active_bytes() - before <= store.nbytes + 2 * 16384


def test_room_beyond_a_quarter_is_not_kept():
    """A buffer of which more than a quarter is room is cut, and a fuller one is shared."""
    for num_tokens, columns in ((40, 40), (191, 191), (192, 256), (300, 300), (1000, 1024)):
        store = PrefixCache(1 << 30)
        data = arrays(mx.float32, num_tokens)
        caches = filled("plain", data, (num_tokens,))
        store.put(list(range(num_tokens)), caches, namespace=NAMESPACE)
        assert store.nbytes == 2 * columns * HEADS * SIZE * 4
        before = active_bytes()
        del caches
        assert active_bytes() <= before


def test_an_entry_keeps_a_ring_at_rest():
    """What only the queries of the last chunk could see is neither stored nor billed."""
    store = PrefixCache(1 << 30)
    store.put(range(LENGTH), filled("full ring", arrays(mx.float32), CHUNKS["at once"]), namespace=NAMESPACE)
    assert store.nbytes == 2 * 24 * HEADS * SIZE * 4


def test_a_compact_entry_costs_nothing_until_somebody_writes():
    """put and take of compact caches copy nothing; the caller's first append copies its buffers, and no other does."""
    data = arrays(mx.float32, 4000)
    caches = filled("plain", data, (3900,))
    store, buffers = PrefixCache(1 << 30), caches[0].nbytes
    before = active_bytes()
    store.put(list(range(3900)), caches, namespace=NAMESPACE)
    hit = store.take(list(range(4000)), namespace=NAMESPACE)
    assert active_bytes() - before < 65536
    feed_all(caches, data, 3900, 3901)
    assert abs(active_bytes() - before - buffers) < 65536
    feed_all(caches, data, 3901, 3910)
    assert abs(active_bytes() - before - buffers) < 65536
    del hit


def test_rows_extracted_from_slots_are_stored_without_the_slots():
    """An entry of an extracted row outlives its batch in its own bytes."""
    before = active_bytes()
    batch = RowBatch(1, max_rows=8)
    slots = [batch.join(num_tokens=1024) for _ in range(8)]
    keys, values = arrays(mx.float32, 500)
    for slot in slots:
        [view] = batch.view([slot], 500)
        mx.eval(attend(view, keys, keys, values, scale=0.1))
        del view
        batch.advance([slot], 500)
    del keys, values
    store = PrefixCache(1 << 30)
    store.put(list(range(500)), batch.extract(3), namespace=NAMESPACE)
    for slot in slots:
        batch.leave(slot)
    del batch
    assert active_bytes() - before <= store.nbytes + 65536


@pytest.mark.parametrize("leave", ["evict", "close", "clear", "replace"])
def test_what_leaves_the_store_is_freed(leave):
    """Caches of an entry that leaves are gone with it, unless a hit still uses their bytes."""
    seen = []
    store = PrefixCache(1 << 30, on_put=lambda view: seen.append(view.session_id))
    before = active_bytes()
    data = arrays(mx.float32)
    stored = active_bytes()
    caches = filled("plain", data, (LENGTH,))
    store.put(list(range(LENGTH)), caches, namespace=NAMESPACE, session_id="a")
    kept = [cache for entry in store._entries for cache in entry.hollow]
    references = [weakref.ref(cache) for cache in [*caches, *kept]]
    del kept
    del caches
    if leave == "evict":
        store.evict_to(0)
    elif leave == "close":
        store.close_session("a")
    elif leave == "clear":
        store.clear()
    else:
        store.put(list(range(LENGTH)), filled("plain", data, (LENGTH,)), namespace=NAMESPACE)
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert active_bytes() <= stored + store.nbytes + 65536 * 2
    assert before <= stored
    assert seen[0] == "a"
