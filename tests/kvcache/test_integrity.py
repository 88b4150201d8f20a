"""`check_integrity` of every stateful manager: silent while books and buffers agree, and not when they do not."""

import mlx.core as mx
import pytest

from headrace_kvcache import (
    CacheList,
    ChunkedKVCache,
    IntegrityError,
    KVBudget,
    KVCache,
    PrefixCache,
    PrefixNamespace,
    QuantizedKVCache,
    RecurrentCache,
    RotatingKVCache,
    TurboQuantKVCache,
    bind_cache_rollback,
    make_row_batch,
    merge_caches,
)
from headrace_kvcache.converting import ConvertingCache
from headrace_kvcache.packing import AffinePacking
from headrace_kvcache.slots import SlotTable

KEYS = mx.ones((1, 1, 9, 64))


def filled(cache, num_tokens=9):
    if isinstance(cache, RecurrentCache):
        cache[0], cache[1] = mx.ones((1, 2)), mx.ones((1, 3))
        cache.advance(num_tokens)
    elif isinstance(cache, CacheList):
        for part in cache.caches:
            filled(part, num_tokens)
    else:
        cache.update_and_fetch(KEYS[:, :, :num_tokens], KEYS[:, :, :num_tokens])
    return cache


def rows(*prototypes):
    batch = make_row_batch(prototypes, max_rows=3)
    batch.join_caches([filled(cache) for cache in prototypes])
    batch.join_caches([filled(cache) for cache in prototypes])
    return batch


def merged(make):
    return merge_caches([filled(make()), filled(make())])


def stored():
    store = PrefixCache(1 << 20, min_tokens=1)
    store.put([*range(9)], [filled(KVCache())], namespace=PrefixNamespace("test", tenant=None))
    return store


def budget():
    each = KVBudget(100)
    each.reserve(40)
    return each


def table():
    each = SlotTable(4)
    each.join((0, 0))
    return each


def set_to(path, value):
    """Return a function that sets an attribute deep inside a manager."""

    def corrupt(manager):
        *parents, name = path.split(".")
        for parent in parents:
            manager = manager[int(parent)] if parent.isdigit() else getattr(manager, parent)
        if name.isdigit():
            manager[int(name)] = value
        else:
            setattr(manager, name, value)

    return corrupt


def row_of(batch, slot=0):
    return batch._batches[0]._table.row(slot)


MANAGERS = {
    "plain": (lambda: filled(KVCache()), set_to("offset", 257)),
    "plain, negative": (lambda: filled(KVCache()), set_to("offset", -1)),
    "plain, without buffers": (KVCache, set_to("offset", 1)),
    "quantized": (lambda: filled(QuantizedKVCache()), set_to("offset", 999)),
    "turbo": (lambda: filled(TurboQuantKVCache()), set_to("offset", 999)),
    "sides of different lengths": (lambda: filled(KVCache()), set_to("values", mx.ones((1, 1, 3, 64)))),
    "ring": (lambda: filled(RotatingKVCache(16)), set_to("offset", 3)),
    "ring, wrapped": (lambda: filled(filled(RotatingKVCache(8)), 1), set_to("_head", 11)),
    "chunked": (lambda: filled(ChunkedKVCache(4)), set_to("offset", 300)),
    "chunked, front": (lambda: filled(ChunkedKVCache(4)), set_to("_first", 256)),
    "converting": (
        lambda: filled(ConvertingCache(KVCache(), AffinePacking(bits=8, group_size=32))),
        set_to("cache.offset", 999),
    ),
    "recurrent": (lambda: filled(RecurrentCache(2)), set_to("_arrays.1", mx.ones((2, 3)))),
    "list": (lambda: filled(CacheList(KVCache(), RecurrentCache(2))), set_to("caches.0.offset", 999)),
    "merged": (lambda: merged(KVCache), set_to("_ends.1", 10)),
    "merged, buffers": (
        lambda: merged(KVCache),
        lambda batch: (batch._ends.extend([0] * 9), batch._written.extend([0] * 9)),
    ),
    "merged, books": (lambda: merged(KVCache), lambda batch: batch._floors.pop()),
    "merged, round": (lambda: merged(KVCache), lambda batch: batch._round.begin({7: 0})),
    "merged recurrent": (lambda: merged(lambda: RecurrentCache(2)), lambda batch: batch._ends.pop()),
    "merged list": (lambda: merged(lambda: CacheList(KVCache())), set_to("caches.0._ends.0", 99)),
    "slots": (lambda: rows(KVCache()), lambda batch: setattr(row_of(batch), "end", 10)),
    "slots, floor": (lambda: rows(RotatingKVCache(4)), lambda batch: setattr(row_of(batch), "floor", 10)),
    "slots, seats": (lambda: rows(KVCache()), lambda batch: setattr(row_of(batch), "seat", 2)),
    "slots, round": (lambda: rows(KVCache()), lambda batch: batch._batches[0]._round.begin({2: 0})),
    "recurrent slots": (lambda: rows(RecurrentCache(2)), set_to("_batches.0._buffers.layers.0.1", mx.ones((1, 3)))),
    "recurrent slots, round": (
        lambda: rows(RecurrentCache(2)),
        lambda batch: batch._batches[0]._round.books.begin({2: 0}),
    ),
    "kinds": (lambda: rows(KVCache(), RecurrentCache(2)), lambda batch: batch._batches[1].leave(0)),
    "kinds, round": (lambda: rows(KVCache(), RecurrentCache(2)), lambda batch: batch._batches[0].spec_round_begin()),
    "slot table": (table, lambda each: each._free.give(0)),
    "budget": (budget, set_to("_used_bytes", 99)),
    "transaction": (
        lambda: bind_cache_rollback([filled(KVCache())]),
        lambda transaction: transaction._layers[0]._calls.begin(),
    ),
}


@pytest.mark.parametrize(("make", "corrupt"), MANAGERS.values(), ids=MANAGERS)
def test_a_corruption_is_found(make, corrupt):
    """What is sound passes; one wrong number in the books, or one wrong buffer, does not."""
    manager = make()
    manager.check_integrity()
    corrupt(manager)
    with pytest.raises(IntegrityError):
        manager.check_integrity()


def test_checking_evaluates_nothing():
    """It reads shapes and numbers, so that it may run between the building of a step and its evaluation."""
    cache = filled(KVCache())
    lazy = cache.update_and_fetch(mx.random.normal((1, 1, 1, 64)), KEYS[:, :, :1])
    before = mx.get_active_memory()
    cache.check_integrity()
    assert mx.get_active_memory() == before
    assert lazy[0].shape[2] == 10


def test_the_prefix_cache_is_checked_too():
    """A store that was used is sound."""
    stored().check_integrity()
