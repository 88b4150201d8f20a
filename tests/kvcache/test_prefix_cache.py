"""Laws of the prefix cache: what it gives, keeps, drops and counts, against a list of entries."""

import logging
import pickle
from collections import Counter

import mlx.core as mx
import pytest
from attrs import define, frozen
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace_kvcache import (
    InvalidLength,
    InvalidPrefix,
    KVCache,
    PrefixCache,
    PrefixNamespace,
    RecurrentCache,
    RotatingKVCache,
)

ONE, OTHER = PrefixNamespace("one"), PrefixNamespace("one", tenant="other")
SIZE = 32
TOKEN_BYTES = 2 * SIZE * 4


def plain(tokens):
    """A cache whose keys are its tokens."""
    cache = KVCache()
    keys = mx.broadcast_to(mx.array(list(tokens), mx.float32)[None, None, :, None], (1, 1, len(tokens), SIZE))
    cache.update_and_fetch(keys, keys)
    return cache


def ring(tokens, size=4):
    cache = RotatingKVCache(size)
    keys = mx.broadcast_to(mx.array(list(tokens), mx.float32)[None, None, :, None], (1, 1, len(tokens), SIZE))
    for at in range(len(tokens)):
        cache.update_and_fetch(keys[:, :, at : at + 1], keys[:, :, at : at + 1])
    return cache


def state(tokens):
    cache = RecurrentCache(1)
    cache[0] = mx.full((1, SIZE), float(sum(tokens)))
    cache.advance(len(tokens))
    return cache


KINDS = {
    "plain": lambda tokens: [plain(tokens)],
    "ring": lambda tokens: [ring(tokens), plain(tokens)],
    "recurrent": lambda tokens: [state(tokens), plain(tokens)],
}


def assert_holds(caches, tokens):
    """The caches hold these tokens and no others."""
    for cache in caches:
        assert cache.offset == len(tokens)
        if isinstance(cache, RecurrentCache):
            assert cache[0][0, 0].item() == sum(tokens)
        elif isinstance(cache, KVCache):
            assert cache.keys[0, 0, : len(tokens), 0].tolist() == list(tokens)
        else:
            held = [] if cache.keys is None else cache.keys[0, 0, : min(len(tokens), 4), 0].tolist()
            assert sorted(held) == sorted(tokens[-4:])


def common(one, other):
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


@define(eq=False)
class NaiveEntry:
    tokens: tuple
    namespace: PrefixNamespace
    least: int
    num_bytes: int
    sessions: set
    last_use: int = 0


class NaiveStore:
    """The contract of the prefix cache over a list."""

    def __init__(self, max_bytes, min_tokens, max_boundaries):
        self.max_bytes, self.min_tokens, self.max_boundaries = max_bytes, min_tokens, max_boundaries
        self.entries, self.clock = [], 0

    def touch(self, entry):
        self.clock += 1
        entry.last_use = self.clock

    def evict_to(self, num_bytes):
        while sum(entry.num_bytes for entry in self.entries) > num_bytes:
            self.entries.remove(min(self.entries, key=lambda entry: entry.last_use))

    def put(self, kind, tokens, namespace, session):
        if namespace is None or len(tokens) < self.min_tokens:
            return False
        least = {"plain": 0, "ring": 0 if len(tokens) < 4 else len(tokens), "recurrent": len(tokens)}[kind]
        columns = {3: 4}.get(len(tokens), min(len(tokens), 4))
        extra = {"plain": 0, "ring": columns * TOKEN_BYTES, "recurrent": SIZE * 4}[kind]
        entry = NaiveEntry(tokens, namespace, least, len(tokens) * TOKEN_BYTES + extra, {session})
        if entry.num_bytes > self.max_bytes:
            return False
        for each in list(self.entries):
            is_ancestor = each.tokens == tokens[: len(each.tokens)] and least <= len(each.tokens)
            if each.namespace == namespace and (each.tokens == tokens or is_ancestor):
                entry.sessions |= each.sessions
                self.entries.remove(each)
        self.evict_to(self.max_bytes - entry.num_bytes)
        self.entries.append(entry)
        self.touch(entry)
        if least == len(tokens):
            own = [each for each in self.entries if each.least == len(each.tokens) and each.sessions == {session}]
            if session is None:
                own = [
                    each for each in own if each.namespace == namespace and each.tokens == tokens[: len(each.tokens)]
                ]
            own = sorted((each for each in own if each.namespace.tenant == namespace.tenant), key=lambda e: e.last_use)
            for each in own[: -self.max_boundaries]:
                self.entries.remove(each)
        return True

    def serving(self, tokens, namespace):
        usable = [
            (min(common(entry.tokens, tokens), len(tokens) - 1), entry)
            for entry in self.entries
            if entry.namespace == namespace
        ]
        return [each for each in usable if each[0] >= max(self.min_tokens, each[1].least)]

    def peek(self, tokens, namespace):
        return max((length for length, _ in self.serving(tokens, namespace)), default=0)

    def take(self, tokens, namespace, session):
        serving = self.serving(tokens, namespace)
        if not serving:
            return None

        def rank(each):
            return each[0], session is not None and session in each[1].sessions, each[1].last_use

        length, entry = max(serving, key=rank)
        self.touch(entry)
        entry.sessions.add(session)
        return length

    def close(self, session, tenant):
        mine = [entry for entry in self.entries if entry.namespace.tenant == tenant]
        for entry in mine:
            if entry.sessions == {session}:
                self.entries.remove(entry)
            entry.sessions.discard(session)


# Prefixes of a few runs, so that keys meet: equal, longer, shorter, and departing.
RUNS = [(1,) * 9, (1, 1, 1, 2, 2, 2, 2, 2, 2), (1, 1, 1, 2, 2, 1, 1, 1, 1)]
TOKENS = st.builds(lambda run, length: run[:length], st.sampled_from(RUNS), st.integers(0, 9))
NAMESPACES = st.sampled_from([ONE, ONE, OTHER, None])
SESSIONS = st.sampled_from(["a", "b", None])


class PrefixCacheMachine(RuleBasedStateMachine):
    """Any sequence of calls: every answer and every entry is that of the list."""

    @initialize(max_bytes=st.sampled_from([1000, 6000, 20000]), boundaries=st.integers(1, 3))
    def start(self, max_bytes, boundaries):
        self.evicted = []
        self.store = PrefixCache(
            max_bytes, min_tokens=2, max_boundaries=boundaries, on_evict=lambda view: self.evicted.append(view.tokens)
        )
        self.naive = NaiveStore(max_bytes, 2, boundaries)
        self.calls = Counter()

    @rule(kind=st.sampled_from(sorted(KINDS)), tokens=TOKENS, namespace=NAMESPACES, session=SESSIONS)
    def put(self, kind, tokens, namespace, session):
        caches = KINDS[kind](tokens) if tokens else [KVCache()]
        is_stored = self.store.put(tokens, caches, namespace=namespace, session_id=session)
        assert is_stored == self.naive.put(kind, tokens, namespace, session)
        assert not is_stored or self.store.holds(tokens, namespace=namespace)
        self.calls["refused"] += not is_stored

    @rule(tokens=TOKENS, namespace=NAMESPACES, session=SESSIONS)
    def take(self, tokens, namespace, session):
        expected = self.naive.peek(tokens, namespace)
        assert self.store.peek(tokens, namespace=namespace) == expected
        hit = self.store.take(tokens, namespace=namespace, session_id=session)
        assert (0 if hit is None else hit.num_tokens) == expected
        self.naive.take(tokens, namespace, session)
        if hit is None:
            self.calls["missed"] += 1
            return
        self.calls["hit"] += 1
        self.calls["reused"] += expected
        assert hit.tokens == tokens[:expected]
        assert expected < len(tokens)
        assert_holds(hit.caches, hit.tokens)
        # A row goes on and writes; the next take of the same must not see it.
        for cache in hit.caches:
            if not isinstance(cache, RecurrentCache):
                cache.update_and_fetch(mx.full((1, 1, 2, SIZE), 9.0), mx.full((1, 1, 2, SIZE), 9.0))
                mx.eval(cache.keys)

    @rule(num_bytes=st.integers(0, 6000))
    def evict(self, num_bytes):
        before = self.store.nbytes
        assert self.store.evict_to(num_bytes) == before - self.store.nbytes
        self.naive.evict_to(num_bytes)

    @rule(session=st.sampled_from(["a", "b"]), tenant=st.sampled_from([None, "other"]))
    def close(self, session, tenant):
        num_before = len(self.naive.entries)
        self.naive.close(session, tenant)
        assert self.store.close_session(session, tenant=tenant) == num_before - len(self.naive.entries)

    @rule()
    def clear(self):
        self.store.clear()
        self.naive.entries.clear()

    @invariant()
    def agrees(self):
        if not hasattr(self, "store"):
            return
        self.store.check_integrity()
        stats = self.store.stats()
        expected = sorted(self.naive.entries, key=lambda entry: entry.last_use)
        held = [(entry.namespace, entry.num_tokens, entry.sessions) for entry in self.store._entries]
        assert held == [(entry.namespace, len(entry.tokens), entry.sessions) for entry in expected]
        assert stats.num_bytes == sum(entry.num_bytes for entry in expected) <= stats.max_bytes
        assert stats.num_entries == len(self.store) == len(expected)
        assert (stats.hits, stats.num_misses) == (self.calls["hit"], self.calls["missed"])
        assert stats.num_tokens_reused == self.calls["reused"]
        assert sum(stats.refused_puts.values()) == self.calls["refused"]
        assert stats.evictions == len(self.evicted)


PrefixCacheMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
test_a_prefix_cache_answers_as_a_list_of_entries_does = PrefixCacheMachine.TestCase


def prompt(length, last=0):
    return [*range(length), last + 1000]


def test_take_gives_never_all_of_a_prompt_and_again_and_again():
    """Invariant 4: at least one token is left to feed; a second take still hits; namespaces do not meet."""
    store, tokens = PrefixCache(1 << 30), list(range(50))
    store.put(tokens, [plain(tokens)], namespace=ONE)
    for _ in range(2):
        assert store.peek(tokens, namespace=ONE) == 49
        hit = store.take(tokens, namespace=ONE)
        assert hit.num_tokens == 49
        assert_holds(hit.caches, tokens[:49])
    assert store.take(prompt(50), namespace=ONE).num_tokens == 50
    others = [
        PrefixNamespace("two"),
        PrefixNamespace("one", "paged"),
        PrefixNamespace("one", adapters=(("digest", 1.0),)),
        PrefixNamespace("one", adapters=(("digest", 0.5),)),
        PrefixNamespace("one", media="digest"),
        OTHER,
    ]
    assert len({ONE, *others}) == 7
    for namespace in others:
        assert store.take(tokens, namespace=namespace) is None
        assert pickle.loads(pickle.dumps(namespace)) == namespace


def test_the_callers_caches_stay_the_callers_whatever_happens():
    """Invariant 5 as ruled: after a refusal and after success the caller goes on with its caches, and nothing moves."""
    store, tokens = PrefixCache(1 << 30), list(range(50))
    caches = [plain(tokens)]
    with pytest.raises(InvalidPrefix, match="layer 0 holds 50 positions, but 49") as caught:
        store.put(tokens[:49], caches, namespace=ONE)
    assert caught.value.layer == pickle.loads(pickle.dumps(caught.value)).layer == 0
    assert_holds(caches, tokens)
    assert store.put(tokens, caches, namespace=ONE)
    caches[0].trim(20)
    caches[0].update_and_fetch(mx.zeros((1, 1, 5, SIZE)), mx.zeros((1, 1, 5, SIZE)))
    assert_holds(store.take(prompt(50), namespace=ONE).caches, tokens)


def test_a_cap_of_zero_stores_nothing_and_the_fresh_insert_is_never_the_victim():
    """Invariant 6, first two parts; what is larger than the cap is refused and drops nothing."""
    tokens = list(range(50))
    off = PrefixCache(0)
    assert not off.put(tokens, [plain(tokens)], namespace=ONE)
    assert off.take(tokens, namespace=ONE) is None
    assert off.peek(tokens, namespace=ONE) == 0
    assert (off.stats().refused_puts["disabled"], off.stats().misses["disabled"], len(off)) == (1, 1, 0)
    store = PrefixCache(50 * TOKEN_BYTES)
    for first in range(5):
        other = [first, *tokens[1:]]
        assert store.put(other, [plain(other)], namespace=ONE)
        assert store.holds(other, namespace=ONE)
        assert len(store) == 1
    assert not store.put(range(51), [plain(range(51))], namespace=ONE)
    assert store.stats().refused_puts["too_large"] == 1
    assert store.holds([4, *tokens[1:]], namespace=ONE)


@pytest.mark.parametrize("kind", ["ring", "recurrent"])
def test_an_untrimmable_entry_neither_hides_nor_supersedes_the_boundary(kind):
    """Trap 3 and invariant 6: prompt and reply serve exact continuation alone, so the boundary entry keeps serving."""
    store, boundary = PrefixCache(1 << 30), list(range(40))
    whole = [*boundary, *range(100, 140)]
    store.put(boundary, KINDS[kind](boundary), namespace=ONE, session_id="a")
    store.put(whole, KINDS[kind](whole), namespace=ONE, session_id="a")
    assert len(store) == 2
    # The reply came back with other tokens: the boundary is all that serves.
    drifted = [*whole[:70], 7, 7, 7]
    assert store.peek(drifted, namespace=ONE) == 40
    hit = store.take(drifted, namespace=ONE)
    assert hit.tokens == tuple(boundary)
    assert_holds(hit.caches, boundary)
    # Exact continuation gets it all, and an exact repeat what lies before its last token.
    assert store.take([*whole, 1], namespace=ONE).num_tokens == 80
    assert store.take(whole, namespace=ONE).num_tokens == 40
    store.put(boundary[:33], KINDS["plain"](boundary[:33]), namespace=ONE)
    assert store.take([*boundary[:36], 5], namespace=ONE).num_tokens == 33


def test_a_trimmable_entry_supersedes_its_ancestors_and_inherits_their_users():
    """Strict prefixes of the same namespace go; who used them is not hurt when the new entry's own session ends."""
    store = PrefixCache(1 << 30)
    for length, session in ((40, "a"), (50, "b"), (60, "c")):
        store.put(range(length), [plain(range(length))], namespace=ONE, session_id=session)
    store.put(range(40), [plain(range(40))], namespace=OTHER, session_id="a")
    assert [entry.num_tokens for entry in store._entries] == [60, 40]
    for session in ("c", "b"):
        assert store.close_session(session) == 0
    assert store.close_session("a", tenant="nobody") == 0
    assert store.close_session("a") == 1
    assert store.take(prompt(40), namespace=ONE) is None
    assert store.take(prompt(40), namespace=OTHER).num_tokens == 40


def test_what_many_sessions_use_belongs_to_none():
    """A shared system prompt outlives each of its users, and does not remember all of them."""
    store = PrefixCache(1 << 30)
    store.put(range(40), [plain(range(40))], namespace=ONE, session_id="first")
    for number in range(100):
        store.take(prompt(40), namespace=ONE, session_id=str(number))
    (entry,) = store._entries
    assert len(entry.sessions) < 10
    for number in range(100):
        assert store.close_session(str(number)) == 0
    assert store.close_session("first") == 0


def test_equally_long_entries_go_by_session_then_by_use():
    """Ties: the session's own first, then the most recently used."""
    store = PrefixCache(1 << 30)
    for last, session in ((1, "a"), (2, "b"), (3, "c")):
        tokens = [*range(40), last]
        store.put(tokens, [plain(tokens)], namespace=ONE, session_id=session, attachments=(last,))
    asked = [*range(40), 9, 9]
    order = [entry.attachments for entry in store._entries]
    store.take(asked, namespace=ONE, session_id="a")
    assert [entry.attachments for entry in store._entries] == [order[1], order[2], order[0]]
    store.take([*range(40), 2, 9], namespace=ONE)
    store.take(asked, namespace=ONE)
    assert [entry.attachments for entry in store._entries][-1] == (2,)


def test_attachments_come_with_the_whole_entry_alone():
    """What belongs to all of an entry's tokens is not handed out for a part of them; replacing replaces it."""
    store = PrefixCache(1 << 30)
    for number in (1, 2):
        store.put(range(50), [plain(range(50))], namespace=ONE, attachments=(number,))
    assert store.take(prompt(50), namespace=ONE).attachments == (2,)
    assert store.take(range(50), namespace=ONE).attachments == ()


def test_one_conversation_does_not_fill_the_store_with_boundaries():
    """The oldest untrimmable entries of a conversation go beyond its number; those that others use too do not count."""
    evicted = []
    store = PrefixCache(1 << 30, on_evict=lambda view: evicted.append(len(view.tokens)))
    shared = list(range(40))
    store.put(shared, KINDS["recurrent"](shared), namespace=ONE, session_id="a")
    store.take(prompt(40), namespace=ONE, session_id="b")
    for length in range(41, 51):
        store.put(range(length), KINDS["recurrent"](range(length)), namespace=ONE, session_id="a")
    assert [entry.num_tokens for entry in store._entries] == [40, 47, 48, 49, 50]
    assert evicted == list(range(41, 47))
    for length in range(51, 58):
        store.put(range(length), KINDS["recurrent"](range(length)), namespace=ONE)
    # Without a session the turns are those that begin with each other.
    assert [entry.num_tokens for entry in store._entries] == [40, 47, 48, 49, 50, 54, 55, 56, 57]


def test_misses_are_counted_by_their_reason():
    """Each way to get nothing has a name, and every call of take is a hit or exactly one miss."""
    store = PrefixCache(1 << 30)
    store.take(prompt(50), namespace=ONE)
    store.put(range(50), KINDS["recurrent"](range(50)), namespace=ONE)
    store.take(prompt(50), namespace=None)
    store.take([7, *range(50)], namespace=ONE)
    store.take([*range(10), *range(60)], namespace=ONE)
    store.take(range(32), namespace=ONE)
    store.take([], namespace=ONE)
    store.take(range(50), namespace=ONE)
    expected = {"disabled": 0, "no_namespace": 1, "empty": 1, "no_match": 1, "too_short": 3, "not_trimmable": 1}
    assert store.stats().misses == expected
    assert not store.put(range(31), [plain(range(31))], namespace=ONE)
    assert not store.put(range(40), [plain(range(40))], namespace=None)
    assert store.stats().refused_puts == {"disabled": 0, "no_namespace": 1, "too_short": 1, "too_large": 0}
    store.clear()
    assert store.stats().misses == expected


@pytest.mark.parametrize("length", [0, 31, 32, 255, 256, 257])
def test_snapshots_of_any_length_are_found_at_that_length(length):
    """Invariant 7, the store's part: a stable boundary is stored and given at exactly its own length, from 32 on."""
    store = PrefixCache(1 << 30)
    tokens = list(range(length))
    caches = [plain(tokens)] if length else [KVCache()]
    assert store.put(tokens, caches, namespace=ONE) == (length >= 32)
    hit = store.take(prompt(length), namespace=ONE)
    assert (0 if hit is None else hit.num_tokens) == (length if length >= 32 else 0)


def test_releasing_a_hit_is_done_once():
    """release is idempotent, in a with block too, and the caches stay usable."""
    store = PrefixCache(1 << 30)
    store.put(range(50), [plain(range(50))], namespace=ONE)
    with store.take(prompt(50), namespace=ONE) as hit:
        hit.release()
    hit.release()
    assert_holds(hit.caches, list(range(50)))


def test_settings_out_of_range_are_refused():
    """Each setting names itself."""
    for settings_, name in (
        ({"max_bytes": -1}, "max_bytes"),
        ({"max_bytes": True}, "max_bytes"),
        ({"max_bytes": 1, "min_tokens": 0}, "min_tokens"),
        ({"max_bytes": 1, "max_boundaries": 0}, "max_boundaries"),
    ):
        with pytest.raises(InvalidLength, match=name):
            PrefixCache(**settings_)
    with pytest.raises(InvalidLength, match="num_bytes"):
        PrefixCache(1).evict_to(-1)


# ---- hooks -----------------------------------------------------------------------------------------------------


def test_hooks_see_what_came_and_what_had_to_leave():
    """on_put for each stored entry, on_evict for those without room alone; what hooks do to caches harms nobody."""
    put, evicted = [], []
    store = PrefixCache(110 * TOKEN_BYTES, on_put=put.append, on_evict=evicted.append)
    store.put(range(40), [plain(range(40))], namespace=ONE, session_id="a")
    store.put(range(60), [plain(range(60))], namespace=ONE, session_id="b")
    assert [(view.tokens, view.namespace, view.session_id) for view in put] == [
        (tuple(range(40)), ONE, "a"),
        (tuple(range(60)), ONE, "b"),
    ]
    assert evicted == []
    put[1].caches[0].update_and_fetch(mx.zeros((1, 1, 3, SIZE)), mx.zeros((1, 1, 3, SIZE)))
    put[1].caches[0].trim(60)
    assert_holds(store.take(prompt(60), namespace=ONE).caches, list(range(60)))
    store.put([7, *range(59)], [plain([7, *range(59)])], namespace=ONE)
    assert [view.tokens for view in evicted] == [tuple(range(60))]
    assert_holds(evicted[0].caches, list(range(60)))


def test_a_hook_that_raises_is_logged_without_a_word_of_the_prompt(caplog):
    """The put succeeds, the error is counted, and its message, which could quote tokens, is not logged."""

    def fail(view):
        raise RuntimeError(f"secret {view.tokens}")

    store = PrefixCache(60 * TOKEN_BYTES, on_put=fail, on_evict=fail)
    with caplog.at_level(logging.WARNING):
        assert store.put(range(40), [plain(range(40))], namespace=ONE)
        assert store.put([7, *range(39)], [plain([7, *range(39)])], namespace=ONE)
    assert store.stats().hook_errors == 3
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text


# ---- the cold store --------------------------------------------------------------------------------------------


@frozen
class FakeColdHit:
    tokens: tuple
    num_tokens: int


class FakeColdStore:
    """Keeps token tuples; `failing` names the call that raises."""

    def __init__(self, *entries, failing=None, lies=False):
        self.entries, self.failing, self.lies = entries, failing, lies
        self.calls = []

    def _call(self, name):
        self.calls.append(name)
        if self.failing == name:
            raise OSError(name)

    def find(self, tokens, namespace):
        self._call("find")
        usable = [(min(common(each, tokens), len(tokens) - 1), each) for each in self.entries if namespace == ONE]
        length, best = max(usable, default=(0, ()))
        return FakeColdHit(best, length) if length else None

    def load(self, hit):
        self._call("load")
        return hit.tokens[:-1] if self.lies else hit.tokens

    def adopt(self, loaded):
        self._call("adopt")
        return [plain(loaded)]


def test_a_cold_entry_wins_only_if_it_is_strictly_longer():
    """Longer: it is loaded, trimmed to the match, and from then on in memory; as long or shorter: it is not read."""
    cold = FakeColdStore(tuple(range(60)), tuple(range(100, 140)))
    store = PrefixCache(1 << 30, cold=cold)
    store.put(range(50), [plain(range(50))], namespace=ONE)
    assert store.peek(prompt(40), namespace=ONE) == 40
    assert store.take(prompt(40), namespace=ONE).num_tokens == 40
    assert cold.calls == ["find", "find"]
    assert store.peek(prompt(55), namespace=ONE) == 55
    hit = store.take(prompt(55), namespace=ONE)
    assert hit.num_tokens == 55
    assert_holds(hit.caches, list(range(55)))
    assert store.holds(range(60), namespace=ONE)
    assert store.take(range(60), namespace=ONE).num_tokens == 59
    stats = store.stats()
    assert (stats.hits, stats.cold_hits, stats.cold_errors, cold.calls.count("load")) == (3, 1, 0, 1)
    assert store.take([*range(100, 120), 1], namespace=ONE) is None
    assert store.take(prompt(55), namespace=OTHER) is None
    store.check_integrity()


@pytest.mark.parametrize("failing", ["find", "load", "adopt"])
def test_a_cold_store_that_fails_is_no_hit_and_hides_none(failing):
    """What is in memory serves as if there were no cold store; the failure is counted and not raised."""
    store = PrefixCache(1 << 30, cold=FakeColdStore(tuple(range(60)), failing=failing))
    assert store.take(range(60), namespace=ONE) is None
    store.put(range(40), [plain(range(40))], namespace=ONE)
    assert store.take(range(60), namespace=ONE).num_tokens == 40
    assert store.stats().cold_errors == 2
    assert store.stats().hits == 1
    store.check_integrity()


def test_a_cold_store_that_gives_something_else_is_not_believed():
    """Caches that do not hold the tokens, or tokens that are not those asked for, are no hit."""
    for cold in (FakeColdStore(tuple(range(60)), lies=True), FakeColdStore()):
        if not cold.entries:
            cold.find = lambda tokens, namespace: FakeColdHit(tuple(range(1, 61)), 45)
        store = PrefixCache(1 << 30, cold=cold)
        assert store.take(prompt(50), namespace=ONE) is None
        assert (store.stats().cold_errors, len(store)) == (1, 0)


def test_a_cold_entry_that_does_not_fit_is_used_and_not_kept():
    """Larger than the cap: the row gets it, the store stays as it is."""
    store = PrefixCache(50 * TOKEN_BYTES, cold=FakeColdStore(tuple(range(60))))
    store.put(range(40), [plain(range(40))], namespace=ONE)
    assert store.take(prompt(60), namespace=ONE).num_tokens == 60
    assert [entry.num_tokens for entry in store._entries] == [40]


@pytest.mark.parametrize("session", ["one", None])
@pytest.mark.parametrize("kind", ["ring", "recurrent"])
def test_a_long_conversation_holds_few_boundaries_and_still_hits(kind, session):
    """Law: thirty turns on caches that cannot be trimmed hold four entries, with a session and without.

    The next turn begins where the last one ended, an edited last turn at the boundary before it, and another
    conversation at the text that both begin with, as long as it comes back to it.
    """
    store = PrefixCache(1 << 30, min_tokens=4)
    opening = tuple(range(40))
    assert store.put(opening, KINDS[kind](opening), namespace=ONE, session_id="other")
    history = opening
    for turn in range(30):
        hit = store.take([*history, 9000 + turn], namespace=ONE, session_id=session)
        assert hit.num_tokens == len(history)
        assert_holds(hit.caches, history)
        asked = (*history, 9000 + turn, 9100 + turn)
        history = (*asked, 9200 + turn)
        for tokens in (asked, history):
            assert store.put(tokens, KINDS[kind](tokens), namespace=ONE, session_id=session)
        assert store.take([*opening, 7], namespace=ONE, session_id="other").num_tokens == 40
        assert len(store) <= 1 + 4
        store.check_integrity()
    edited = store.take([*asked, 1, 2], namespace=ONE, session_id=session)
    assert edited.tokens == asked
