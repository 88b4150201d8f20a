"""Laws of shared beginnings: entries hold them once, and serve what they would serve alone."""

import gc
import weakref

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvcache import (
    InvalidLength,
    InvalidPrefix,
    KVCache,
    PrefixCache,
    PrefixFolder,
    PrefixNamespace,
    QuantizedKVCache,
    RecurrentCache,
    RotatingKVCache,
    TurboQuantKVCache,
)

NAMESPACE = PrefixNamespace("unquantized")
SIZE = 32
STEM = 300
TOKEN_BYTES = 2 * SIZE * 4


def keys_of(tokens, size=SIZE):
    """Keys that follow from the tokens before and at each position, as a model's do."""
    at = mx.cumsum(mx.array(list(tokens), mx.float32))[None, None, :, None]
    return mx.sin(at * mx.arange(1, size + 1))


def fed(cache, tokens, size=SIZE):
    keys = keys_of(tokens, size)
    cache.update_and_fetch(keys, -keys)
    return cache


def state(tokens):
    cache = RecurrentCache(1)
    cache[0] = mx.full((1, 8), float(sum(tokens)))
    cache.advance(len(tokens))
    return cache


KINDS = {
    "plain": lambda tokens: [fed(KVCache(), tokens), fed(KVCache(), tokens)],
    "quantized": lambda tokens: [fed(QuantizedKVCache(bits=4, group_size=32), tokens)],
    "turbo": lambda tokens: [fed(TurboQuantKVCache(), tokens, 64)],
    "ring": lambda tokens: [fed(RotatingKVCache(16), tokens), fed(KVCache(), tokens)],
    "recurrent": lambda tokens: [state(tokens), fed(KVCache(), tokens)],
}


def rest(tokens, first, kind="plain"):
    """The caches of `KINDS`, those whose column p is position p without the first ones."""
    caches = KINDS[kind](tokens)
    for layer, cache in enumerate(caches):
        if isinstance(cache, KVCache | QuantizedKVCache | TurboQuantKVCache):
            keys = keys_of(tokens, 64 if kind == "turbo" else SIZE)[:, :, first:]
            caches[layer] = type(cache).from_state((None, None, 0, *cache.state[3:]))
            caches[layer].update_and_fetch(keys, -keys)
    return caches


def go_on(store, tokens, kind="plain", **about):
    """Store tokens of which the store has the first ones; return how many these are."""
    first = store.held(tokens, namespace=NAMESPACE)
    assert store.put(tokens, rest(tokens, first, kind), namespace=NAMESPACE, first=first, **about)
    store.check_integrity()
    return first


def branch(number, length=40):
    return tuple(range(STEM)) + tuple(1000 * number + each for each in range(length))


def put(store, tokens, kind="plain", **about):
    assert store.put(tokens, KINDS[kind](tokens), namespace=NAMESPACE, **about)
    store.check_integrity()


def assert_serves(store, tokens, kind="plain"):
    """A hit of exactly these tokens goes on as a cache that was fed them does."""
    hit = store.take([*tokens, 5], namespace=NAMESPACE)
    assert hit.tokens == tuple(tokens)
    size = 64 if kind == "turbo" else SIZE
    for got, made in zip(hit.caches, KINDS[kind](tokens), strict=True):
        if isinstance(made, RecurrentCache):
            assert mx.array_equal(got[0], made[0])
            continue
        query = keys_of([7, 8], size)
        one, other = (each.attend(query, query, -query, scale=0.1) for each in (got, made))
        assert mx.array_equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_branches_hold_their_common_beginning_once(kind):
    """Law: ten branches of one stem cost the stem once, and each serves itself bit for bit."""
    store, alone = PrefixCache(1 << 30), PrefixCache(1 << 30)
    put(alone, branch(0), kind)
    for number in range(10):
        put(store, branch(number), kind)
    linear_share = {"plain": 1, "quantized": 1, "turbo": 1, "ring": 0.8, "recurrent": 0.99}[kind]
    # With the copies of ten tails of 40 beside a stem of 300, and what no segment holds.
    assert store.nbytes < alone.nbytes * (1 + 9 * 40 / 340 + 9 * (1 - linear_share) + 0.1)
    for number in range(10):
        assert_serves(store, branch(number), kind)


def test_a_hit_can_be_changed_without_the_others_noticing():
    """Law: what a caller appends to a hit, or to the caches that it put, changes no entry."""
    store = PrefixCache(1 << 30)
    own = KINDS["plain"](branch(0))
    assert store.put(branch(0), own, namespace=NAMESPACE)
    put(store, branch(1))
    for cache in own:
        cache.trim(100)
        fed(cache, [9] * 60)
    hit = store.take([*branch(1), 5], namespace=NAMESPACE)
    for cache in hit.caches:
        cache.trim(200)
        fed(cache, [9] * 300)
    assert_serves(store, branch(0))
    assert_serves(store, branch(1))


@pytest.mark.parametrize("kind", ["plain", "quantized"])
def test_a_trimmed_hit_ends_within_any_segment(kind):
    """Law: prompts that leave an entry in its shared part, at its border or in its own rest get what they share."""
    store = PrefixCache(1 << 30)
    for number in range(3):
        put(store, branch(number), kind)
    for length in (100, 299, 300, 301, 339):
        assert_serves(store, branch(1)[:length], kind)


def test_untrimmable_turns_hold_their_history_once():
    """Law: the snapshots of one conversation on a hybrid model cost its history once, and a state each."""
    store, history = PrefixCache(1 << 30, max_boundaries=8), tuple(range(400))
    for turn in range(6):
        history += tuple(range(1000 * turn, 1000 * turn + 50))
        put(store, history, "recurrent", session_id="one")
    assert len(store) == 6
    assert store.nbytes <= TOKEN_BYTES * (700 + 256) + 6 * 32
    for turn in range(6):
        assert_serves(store, history[: 450 + 50 * turn], "recurrent")


def test_dropped_entries_give_their_bytes_back_at_once():
    """Law: nothing but the books keeps shared bytes alive: no cycle waits for the collector."""
    gc.disable()
    try:
        store = PrefixCache(1 << 30)
        for number in range(3):
            put(store, branch(number))
        segments = [weakref.ref(segment) for entry in store._entries for segment in entry.segments]
        assert len(set(segments)) == 4
        store.clear()
        del store
        assert [segment() for segment in segments] == [None] * len(segments)
    finally:
        gc.enable()


def test_what_does_not_pay_is_not_shared():
    """Law: short beginnings, and those that would cost the copy of something much longer, stay apart."""
    store = PrefixCache(1 << 30)
    put(store, tuple(range(100)) + (1,) * 100)
    put(store, tuple(range(100)) + (2,) * 100)
    assert store.nbytes == 2 * 2 * 200 * TOKEN_BYTES or store.nbytes == 2 * 2 * 256 * TOKEN_BYTES
    store.clear()
    put(store, tuple(range(3000)))
    before = store.nbytes
    put(store, (*range(300), *([3] * 20)))
    assert store.nbytes - before >= 2 * 320 * TOKEN_BYTES


def test_entries_of_other_shapes_share_nothing():
    """Law: equal tokens of caches of another geometry under one namespace stay apart, and serve."""
    store = PrefixCache(1 << 30)
    put(store, branch(0))
    put(store, branch(1), "quantized")
    assert_serves(store, branch(0))
    assert_serves(store, branch(1), "quantized")


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_goes_on_from_another_without_its_positions(kind):
    """Law: turn by turn, what is put without what the store has serves as if it had been put whole."""
    store, history = PrefixCache(1 << 30, max_boundaries=20), tuple(range(STEM))
    assert store.held(history, namespace=NAMESPACE) == 0
    put(store, history, kind, session_id="one")
    for turn, length in enumerate((1, 20, 200, 35, 256, 3)):
        known = len(history)
        history += tuple(range(1000 * turn, 1000 * turn + length))
        assert store.held(history, namespace=NAMESPACE) == known
        assert go_on(store, history, kind, session_id="one") == known
        assert_serves(store, history, kind)
        if kind in ("plain", "quantized", "turbo"):
            assert (len(store), len({id(each) for entry in store._entries for each in entry.segments})) == (1, 1)
            assert_serves(store, history[:250], kind)
    assert store.held(history, namespace=NAMESPACE) == (0 if len(store) == 1 else known)
    assert store.held(history, namespace=None) == 0


def test_a_conversation_that_goes_on_copies_its_history_once_in_many_turns():
    """Law: a turn allocates its own positions; what grows beyond its room gets an eighth more, not a slab."""
    store, history = PrefixCache(1 << 30), tuple(range(4000))
    put(store, history)
    copied = []
    for turn in range(40):
        history += tuple(range(100 * turn, 100 * turn + 30))
        first = store.held(history, namespace=NAMESPACE)
        caches = rest(history, first)
        mx.eval([cache.state for cache in caches])
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        assert store.put(history, caches, namespace=NAMESPACE, first=first)
        copied.append((mx.get_peak_memory() - before) // TOKEN_BYTES // 2)
    assert sum(num_tokens > 300 for num_tokens in copied) <= 3, copied
    assert store.nbytes <= 2 * TOKEN_BYTES * (len(history) * 9 // 8 + 256)
    assert_serves(store, history)
    store.check_integrity()


def test_what_goes_on_changes_no_hit():
    """Law: a hit that is still in use when its entry goes on keeps what it was given."""
    store = PrefixCache(1 << 30)
    put(store, branch(0))
    hit = store.take([*branch(0), 5], namespace=NAMESPACE)
    go_on(store, (*branch(0), 1, 2, 3))
    go_on(store, (*branch(0), 1, 2, 3, 4))
    for got, made in zip(hit.caches, KINDS["plain"](branch(0)), strict=True):
        assert mx.array_equal(got.keys_and_values()[0], made.keys_and_values()[0])
        fed(got, [9] * 10)
    assert_serves(store, (*branch(0), 1, 2, 3, 4))


def test_branches_that_go_on_still_share_their_beginning():
    """Law: a conversation that goes on writes behind its own rest, and never behind what another one holds."""
    store = PrefixCache(1 << 30)
    for number in range(2):
        put(store, branch(number))
    before = store.nbytes
    for number in range(2):
        assert go_on(store, (*branch(number), 1, 2, 3)) == 340
        go_on(store, (*branch(number), 1, 2, 3, *range(50)))
    assert len(store) == 2
    assert store.nbytes - before <= 2 * 2 * 256 * TOKEN_BYTES
    for number in range(2):
        assert_serves(store, (*branch(number), 1, 2, 3, *range(50)))
        assert_serves(store, branch(number))


def test_room_never_passes_the_cap():
    """Law: where an eighth of room would not fit, what goes on is kept beside what was there."""
    store = PrefixCache(2 * TOKEN_BYTES * 860)
    put(store, tuple(range(768)))
    go_on(store, tuple(range(800)))
    assert store.nbytes <= store.max_bytes
    assert_serves(store, tuple(range(800)))


def test_going_on_is_refused_where_nothing_is_there():
    """Law: without an entry to go on from, of another length or in another form, nothing is stored or lost."""
    store, tokens = PrefixCache(1 << 30), branch(0)
    put(store, tokens[:320])
    for first in (-1, True, 340, 1.0):
        with pytest.raises(InvalidLength):
            store.put(tokens, rest(tokens, 320), namespace=NAMESPACE, first=first)
    for first, caches in (
        (319, rest(tokens, 319)),
        (320, rest(tokens, 319)),
        (320, KINDS["plain"](tokens)),
        (320, rest(tokens, 320, "quantized")),
        (320, [state(tokens)]),
        (0, rest(tokens, 320)),
    ):
        with pytest.raises(InvalidPrefix):
            store.put(tokens, caches, namespace=NAMESPACE, first=first)
        store.check_integrity()
    assert_serves(store, tokens[:320])
    other = PrefixCache(1 << 30)
    assert other.put(tokens, [state(tokens)], namespace=NAMESPACE)
    assert other.held((*tokens, 1), namespace=NAMESPACE) == 0, "a state alone leaves nothing out"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "go on", "take", "evict"]), st.integers(0, 5), st.integers(0, 3), st.integers(0, 90)
        ),
        max_size=14,
    ),
    st.sampled_from(["plain", "recurrent"]),
)
@settings(max_examples=16, deadline=None)
def test_any_order_of_calls_keeps_the_books_and_the_bytes(calls, kind):
    """Law: whatever is put, taken and evicted, the books hold, the cap too, and hits are what was put."""
    store = PrefixCache(2_500 * TOKEN_BYTES, max_boundaries=3)
    for name, number, inner, length in calls:
        # A tree: branches of a stem of 300 that have branches at 280 tokens themselves.
        tokens = (*range(STEM), *(100 * number + each for each in range(280)), *([7 + inner] * length))
        if name == "evict":
            store.evict_to(length * 20 * TOKEN_BYTES)
        elif name == "put":
            store.put(tokens, KINDS[kind](tokens), namespace=NAMESPACE, session_id=str(inner))
        elif name == "go on":
            first = store.held(tokens, namespace=NAMESPACE)
            store.put(tokens, rest(tokens, first, kind), namespace=NAMESPACE, session_id=str(inner), first=first)
        else:
            hit = store.take([*tokens, 5], namespace=NAMESPACE)
            if hit is not None:
                assert hit.tokens == tokens[: hit.num_tokens]
                for got, made in zip(hit.caches, KINDS[kind](hit.tokens), strict=True):
                    if isinstance(made, KVCache):
                        assert mx.array_equal(got.keys_and_values()[0], made.keys_and_values()[0])
        store.check_integrity()
        assert store.nbytes <= store.max_bytes


def test_shared_entries_come_back_from_a_folder(tmp_path):
    """Law: files hold whole entries within the limit, and share again once loaded."""
    store = PrefixCache(1 << 30)
    for number in range(4):
        put(store, branch(number))
    folder = PrefixFolder(tmp_path, identity="i", max_bytes=1 << 30)
    assert folder.save(store).num_entries == 4
    again = PrefixCache(1 << 30)
    assert PrefixFolder(tmp_path, identity="i", max_bytes=1 << 30).load(again).num_entries == 4
    again.check_integrity()
    assert again.nbytes <= store.nbytes
    for number in range(4):
        assert_serves(again, branch(number))
    small = PrefixFolder(tmp_path / "small", identity="i", max_bytes=3 * 2 * 340 * TOKEN_BYTES)
    report = small.save(store)
    assert (report.num_entries, report.num_skipped) == (3, 1)
