"""Laws of rounds: after any rounds of drafts, kept in part, every cache is one that never drafted."""

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import cache as theirs
from mlx_lm.models.base import scaled_dot_product_attention

from headrace_kvcache import (
    CacheList,
    CapacityClasses,
    ChunkedKVCache,
    InvalidCountError,
    KVCache,
    QuantizedKVCache,
    RecurrentCache,
    RotatingKVCache,
    RotatingQuantizedKVCache,
    RoundRefusedError,
    StateInvalidError,
    TurboQuantKVCache,
    attend,
    bind_cache_rollback,
    bind_row_cache_rollback,
    clone_caches,
    load_caches,
    make_row_batch,
    merge_caches,
    save_caches,
)
from headrace_kvcache.converting import ConvertingCache
from headrace_kvcache.packing import AffinePacking
from headrace_kvcache.single_rows import read_single

HEADS, KV_HEADS, HEAD_DIM = 2, 1, 64
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
TOLERANCE = {mx.float32: 2e-5, mx.bfloat16: 8e-2}
SMALL = CapacityClasses(capacities=(3, 10))
SLACK = 4
PACKING = AffinePacking(bits=8, group_size=32)

OWN = {
    "plain": lambda: [KVCache(), KVCache()],
    "quantized 8": lambda: [QuantizedKVCache(bits=8, group_size=32)],
    "quantized 4": lambda: [QuantizedKVCache(bits=4, group_size=64)],
    "ring": lambda: [RotatingKVCache(7), RotatingKVCache(12)],
    "ring with sinks": lambda: [RotatingKVCache(9, 3)],
    "quantized ring": lambda: [RotatingQuantizedKVCache(8, 1, bits=4, group_size=32)],
    "chunked": lambda: [ChunkedKVCache(6)],
    "recurrent": lambda: [RecurrentCache(2)],
    "lists": lambda: [CacheList(KVCache(), RotatingKVCache(5)), CacheList(KVCache(), RecurrentCache(2))],
    "sliding model": lambda: [RotatingKVCache(7), RotatingKVCache(7), KVCache()],
    "hybrid model": lambda: [RecurrentCache(2), QuantizedKVCache(bits=8, group_size=32), RecurrentCache(2)],
}
ALONE = {
    **OWN,
    "turbo": lambda: [TurboQuantKVCache(key_bits=8, value_bits=4)],
    "converting": lambda: [ConvertingCache(KVCache(), PACKING, start=5), ConvertingCache(KVCache(), PACKING)],
    "converting ring": lambda: [ConvertingCache(RotatingKVCache(8, 2), PACKING, start=9)],
}
FOREIGN = {
    "mlx-lm plain": lambda: [theirs.KVCache()],
    "mlx-lm quantized": lambda: [theirs.QuantizedKVCache(group_size=32, bits=8)],
    "mlx-lm ring": lambda: [theirs.RotatingKVCache(max_size=24), theirs.KVCache()],
    "mlx-lm chunked": lambda: [theirs.ChunkedKVCache(chunk_size=16)],
    "mlx-lm list": lambda: [theirs.CacheList(theirs.KVCache(), theirs.RotatingKVCache(max_size=24, keep=2))],
    "both": lambda: [theirs.KVCache(), RotatingKVCache(7), theirs.CacheList(theirs.KVCache())],
}
# A chunked cache has no batch in mlx-lm's protocol.
MERGED = {name: make for name, make in OWN.items() if name != "chunked"}


def leaves(caches):
    for cache in caches:
        parts = getattr(cache, "caches", None)
        yield from [cache] if parts is None else leaves(parts)


def sum_up(arrays, inputs, mask):
    """A toy recurrence: the last two real inputs, and a decaying float32 sum."""
    tail, total = arrays
    tail = mx.zeros((inputs.shape[0], 2, inputs.shape[2]), inputs.dtype) if tail is None else tail
    total = mx.zeros((inputs.shape[0], inputs.shape[2])) if total is None else total
    outputs = []
    for t in range(inputs.shape[1]):
        real = mx.ones((inputs.shape[0], 1), mx.bool_) if mask is None else mask[:, t : t + 1]
        total = mx.where(real, total * 0.5 + inputs[:, t] + tail[:, 0], total)
        tail = mx.where(real[..., None], mx.stack([tail[:, 1], inputs[:, t]], 1), tail)
        outputs.append(total)
    return [tail, total], mx.stack(outputs, 1)


def sum_up_again(arrays, kept, inputs):
    """The replay of all toy layers at once: a function of its arguments alone."""
    return sum_up(arrays, inputs, kept.mask(inputs.shape[1]))[0]


def recur(cache, inputs):
    # Layers may tell either kind of replay in any step.
    if inputs.shape[1] % 3:
        cache.record(sum_up_again, inputs)
    else:
        cache.record(lambda arrays, kept: sum_up_again(arrays, kept, inputs))
    (cache[0], cache[1]), outputs = sum_up([cache[0], cache[1]], inputs, cache.make_mask(inputs.shape[1]))
    cache.advance(inputs.shape[1])
    return outputs


def chunk_mask(cache, num_tokens):
    """The mask that mlx-lm's Llama 4 makes for its chunked layers."""
    cache.maybe_trim_front()
    columns = mx.arange(cache.start_position, cache.offset + num_tokens)
    positions = mx.arange(cache.offset, cache.offset + num_tokens)[:, None]
    return (columns // cache.chunk_size == positions // cache.chunk_size) & (columns <= positions)


def run_layer(cache, arrays):
    """Run one toy layer, `(B, T, ...)` out: recurrent, over `attend`, or as mlx-lm's models call caches."""
    queries, keys, values = arrays
    if hasattr(cache, "record"):
        return recur(cache, queries[:, 0])
    if hasattr(cache, "attend"):
        return attend(cache, queries, keys, values, scale=0.2).swapaxes(1, 2)
    is_chunked = isinstance(cache, theirs.ChunkedKVCache)
    count = keys.shape[2]
    mask = chunk_mask(cache, count) if is_chunked else cache.make_mask(count, return_array=False, window_size=None)
    held = cache.update_and_fetch(keys, values)
    return scaled_dot_product_attention(queries, *held, cache, scale=0.2, mask=mask).swapaxes(1, 2)


class Alone:
    """Single-row caches."""

    def __init__(self, make, num_rows):
        assert num_rows == 1
        self.caches = make()
        self.transaction = bind_cache_rollback(self.caches)

    def forward(self, arrays, num_tokens):
        return [run_layer(cache, arrays) for cache in leaves(self.caches)]

    def resolve(self, accepted):
        self.transaction.resolve(accepted[0])

    def extract(self, row):
        return list(leaves(self.caches))

    def check(self):
        for cache in leaves(self.caches):
            if not type(cache).__module__.startswith("mlx_lm"):
                cache.check_integrity()


class Merged:
    """A batch of them in mlx-lm's protocol."""

    def __init__(self, make, num_rows):
        self.caches = [merge_caches(each) for each in zip(*(make() for _ in range(num_rows)), strict=True)]
        self.transaction = bind_row_cache_rollback(self.caches, num_rows)

    def forward(self, arrays, num_tokens):
        return [run_layer(cache, arrays) for cache in leaves(self.caches)]

    def resolve(self, accepted):
        self.transaction.resolve(accepted)

    def extract(self, row):
        return list(leaves([cache.extract(row) for cache in self.caches]))

    def check(self):
        for cache in self.caches:
            cache.check_integrity()


class Slots:
    """Slots of a model; a row that stays out of all rounds lies between them."""

    num_outside = 1

    def __init__(self, make, num_rows):
        max_rows = num_rows + self.num_outside
        self.batch = make_row_batch(make(), max_rows=max_rows, classes=SMALL, slack=SLACK)
        self.slots = [self.batch.join() for _ in range(max_rows)]
        del self.slots[1 : 1 + self.num_outside]
        self.transaction = bind_row_cache_rollback([self.batch], num_rows, slots=self.slots)

    def forward(self, arrays, num_tokens):
        outputs = [run_layer(view, arrays) for view in leaves(self.batch.view(self.slots, num_tokens))]
        self.batch.advance(self.slots, num_tokens)
        return outputs

    def resolve(self, accepted):
        self.transaction.resolve(accepted)

    def extract(self, row):
        return list(leaves(self.batch.extract(self.slots[row])))

    def check(self):
        self.batch.check_integrity()


class AllSlots(Slots):
    """Slots of which none is left out."""

    num_outside = 0


class Drafting:
    """Drives caches that draft and, beside them, each row's own caches, which are fed what was kept."""

    def __init__(self, kind, make, num_rows, seed, dtype=mx.float32, *, may_refuse=False):
        self.drafted = kind(make, num_rows)
        self.clean = [make() for _ in range(num_rows)]
        self.random = np.random.default_rng(seed)
        self.dtype, self.may_refuse = dtype, may_refuse
        self.worst, self.num_rounds, self.num_refused = 0.0, 0, 0

    def arrays(self, num_tokens):
        return [
            mx.array(self.random.normal(size=(len(self.clean), heads, num_tokens, HEAD_DIM))).astype(self.dtype)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]

    def feed(self, arrays, keeps, cuts):
        """Feed the drafted caches all of it, in pieces, and the clean ones the first `keeps` of each row at once."""
        total = arrays[0].shape[2]
        bounds = sorted({0, *(cut for cut in cuts if cut < total), total})
        pieces = [
            self.drafted.forward([array[:, :, low:high] for array in arrays], high - low)
            for low, high in pairwise(bounds)
        ]
        outputs = [mx.concatenate(parts, axis=1) for parts in zip(*pieces, strict=True)]
        for row, (caches, kept) in enumerate(zip(self.clean, keeps, strict=True)):
            own = [array[row : row + 1, :, :kept] for array in arrays]
            for cache, output in zip(leaves(caches), outputs, strict=True):
                difference = mx.abs(run_layer(cache, own) - output[row : row + 1, :kept])
                self.worst = max(self.worst, difference.max().item())

    def step(self, num_tokens):
        self.feed(self.arrays(num_tokens), [num_tokens] * len(self.clean), ())

    def round(self, drafts, shares, cuts=()):
        accepted = [int((drafts + 1) * share * 0.999) for share in shares[: len(self.clean)]]
        transaction = self.drafted.transaction
        if not transaction.can_begin(drafts):
            assert self.may_refuse or (isinstance(self.drafted, Slots) and drafts >= SLACK), "no room for a round"
            with pytest.raises(RoundRefusedError):
                transaction.begin(drafts)
            self.num_refused += 1
            self.step(1)
            return
        transaction.begin(drafts)
        transaction.check_integrity()
        self.feed(self.arrays(drafts + 1), [count + 1 for count in accepted], cuts)
        self.drafted.resolve(accepted)
        transaction.check_integrity()
        self.num_rounds += 1

    def check(self):
        """Stored bytes are equal, books and buffers agree, and attention was within rounding."""
        self.drafted.check()
        for row, caches in enumerate(self.clean):
            for mine, own in zip(self.drafted.extract(row), leaves(caches), strict=True):
                assert mine.offset == own.offset if hasattr(own, "offset") else True
                assert same_bytes(mine, own)
        assert self.worst <= TOLERANCE[self.dtype]


def same_bytes(mine, own):
    if type(own).__module__.startswith("mlx_lm"):
        return True
    if isinstance(own, ConvertingCache):
        mine, own = mine.cache, own.cache
    assert type(mine) is type(own)
    if not own.offset:
        return True
    if isinstance(own, RecurrentCache):
        pairs = zip(mine.state[0], own.state[0], strict=True)
    elif isinstance(own, TurboQuantKVCache):
        pairs = zip(mine.keys_and_values(), own.keys_and_values(), strict=True)
    else:
        pairs = zip(read_single(mine).fields, read_single(own).fields, strict=True)
    return all(mx.array_equal(one, two) for one, two in pairs)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.sampled_from([1, 1, 2, 9])),
        st.tuples(
            st.just("round"),
            st.integers(0, 5),
            st.lists(st.floats(0, 1), min_size=4, max_size=4),
            st.lists(st.integers(1, 5), max_size=3),
        ),
    ),
    max_size=8,
)
CASES = [
    *((Alone, name, 1) for name in (*ALONE, *FOREIGN)),
    *((Merged, name, 3) for name in MERGED),
    *((Slots, name, 3) for name in OWN),
    *((AllSlots, name, 3) for name in ("recurrent", "lists", "hybrid model")),
]
NAMES = [f"{kind.__name__}-{name}" for kind, name, _ in CASES]


def drafting(kind, name, num_rows, seed, dtype=mx.float32):
    make = (FOREIGN if name in FOREIGN else ALONE)[name]
    return Drafting(kind, make, num_rows, seed, dtype, may_refuse=name in FOREIGN)


@pytest.mark.parametrize(("kind", "name", "num_rows"), CASES, ids=NAMES)
@settings(max_examples=3, deadline=None)
@given(
    first=st.sampled_from([0, 1, 5, 6, 7, 8, 20]),
    operations=OPERATIONS,
    dtype=st.sampled_from([*DTYPES.values()]),
    seed=st.integers(0, 99),
)
def test_rollback_equals_never_having_drafted(kind, name, num_rows, first, operations, dtype, seed):
    """Any rounds, rejected anywhere, per row, in one forward or several: bytes equal, attention within rounding."""
    run = drafting(kind, name, num_rows, seed, dtype)
    if first:
        run.step(first)
    for operation, *arguments in operations:
        getattr(run, operation)(*arguments)
        run.check()
    run.step(1)
    run.check()


@pytest.mark.parametrize("name", ["ring with sinks", "quantized ring", "chunked"])
@pytest.mark.parametrize("end", [5, 8, 9, 25])
def test_every_acceptance_at_every_place_of_a_ring(name, end):
    """Before, at and after the wrap, from none to all accepted, drafting goes on; equal to never having drafted."""
    for accepted in range(4):
        run = drafting(Alone, name, 1, end)
        run.step(end)
        for cuts in ((), (1, 2, 3), (2,)):
            run.round(3, [(accepted + 0.5) / 4], cuts)
            run.check()
        assert run.num_rounds == 3


@pytest.mark.parametrize("window", [6, 12])
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_a_foreign_ring_drafts_up_to_its_wrap_and_not_further(window, drafts):
    """The last round is the one with offset + drafts + 1 = max_size - 1, and up to it the ring is right (K-92)."""
    run = Drafting(Alone, lambda: [theirs.RotatingKVCache(max_size=window)], 1, 1, may_refuse=True)
    while run.drafted.caches[0].offset + drafts + 1 < window:
        run.round(drafts, [0.0])
        run.check()
    held = run.drafted.caches[0].offset
    assert held + drafts + 1 == window
    assert run.num_refused == 0
    run.round(drafts, [0.0])
    assert (run.num_refused, run.drafted.caches[0].offset) == (1, held + 1)
    run.step(1)
    run.check()


def test_a_foreign_chunked_cache_refuses_where_drafts_would_push_out_what_it_needs():
    """Fed one by one, drafts in the next chunk drop the start of this one: such rounds do not fit, all others do."""
    for end in range(1, 24):
        run = Drafting(Alone, lambda: [theirs.ChunkedKVCache(chunk_size=8)], 1, end, may_refuse=True)
        for _ in range(end):
            run.step(1)
        run.round(3, [0.0], (1, 2, 3))
        assert run.num_refused == ((end + 1) % 8 == 7)
        run.step(1)
        run.check()


def test_a_falsely_trimmable_cache_gets_no_drafts():
    """mlx-lm's concatenating cache appends behind what it was to forget, whatever it says."""
    cache = theirs.ConcatenateKVCache()
    assert cache.is_trimmable()
    assert not bind_cache_rollback([cache]).can_begin(0)


@pytest.mark.parametrize("drafts", [SLACK - 1, SLACK])
def test_slots_of_rings_take_back_their_slack_and_no_more(drafts):
    """A wrapped ring with slack s fits s - 1 drafts, so that even a round that keeps nothing finds all it overwrote."""
    run = Drafting(Slots, OWN["ring"], 2, 1)
    run.step(20)
    assert run.drafted.transaction.can_begin(drafts) == (drafts < SLACK)
    run.round(drafts, [0.0, 0.9])
    run.check()
    assert run.num_refused == (drafts >= SLACK)


@pytest.mark.parametrize("name", OWN)
def test_a_round_that_keeps_nothing_leaves_what_it_found(name):
    """The trio itself may keep 0 positions; the ring then has its whole window, as before."""
    for end in (5, 7, 8, 20):
        run = drafting(Alone, name, 1, end)
        run.step(end)
        for cache in leaves(run.drafted.caches):
            cache.spec_round_begin()
        run.drafted.forward(run.arrays(4), 4)
        for cache in leaves(run.drafted.caches):
            assert cache.is_in_round
            cache.spec_round_rollback(0)
            assert not cache.is_in_round
        run.check()
        run.step(2)
        run.check()


@pytest.mark.parametrize("name", OWN)
def test_rounds_of_a_single_cache_are_checked(name):
    """Begun once, ended once, keeping what was appended at most; a refusal leaves the round open."""
    run = drafting(Alone, name, 1, 3)
    run.step(11)
    for cache in leaves(run.drafted.caches):
        for refused in (cache.spec_round_commit, lambda cache=cache: cache.spec_round_rollback(1)):
            with pytest.raises(RoundRefusedError):
                refused()
        cache.spec_round_begin()
        with pytest.raises(RoundRefusedError):
            cache.spec_round_begin()
    run.feed(run.arrays(3), [3], ())
    for cache in leaves(run.drafted.caches):
        for keep in (-1, 4, True, 1.0, [1, 1]):
            with pytest.raises(InvalidCountError):
                cache.spec_round_rollback(keep)
        for drafts in (-1, True, 1.0):
            with pytest.raises(InvalidCountError):
                cache.spec_round_fits(drafts)
        cache.spec_round_commit()
    run.check()
    run.step(2)
    run.check()


@pytest.mark.parametrize("make", [lambda: RotatingKVCache(8), lambda: ChunkedKVCache(8)], ids=["ring", "chunked"])
def test_what_a_round_keeps_goes_after_it(make):
    """A committed or rolled-back round costs its own positions until the next append, and nothing later."""
    run = Drafting(Alone, lambda: [make()], 1, 0)
    run.step(600)
    for _ in range(40):
        run.round(3, [0.5])
        run.step(1)
    quiet = Drafting(Alone, lambda: [make()], 1, 0)
    quiet.step(600)
    quiet.step(1)
    [cache], [other] = run.drafted.caches, quiet.drafted.caches
    assert cache.nbytes == other.nbytes
    run.check()


def test_compacting_waits_for_the_end_of_a_round():
    """A ring's spare columns are what the rollback needs."""
    run = drafting(Alone, "ring", 1, 0)
    run.step(20)
    run.drafted.transaction.begin(3)
    run.feed(run.arrays(4), [2], ())
    for cache in run.drafted.caches:
        cache.compact()
    run.drafted.resolve([1])
    run.check()
    for cache in run.drafted.caches:
        cache.compact()
        assert cache.keys.shape[2] == cache.max_size
    run.step(2)
    run.check()


def test_a_recurrent_layer_that_does_not_tell_gets_no_drafts():
    """Once a step was made without `record`, no round with drafts fits; clones know it too."""
    cache = RecurrentCache(1)
    transaction = bind_cache_rollback([cache])
    assert transaction.can_begin(3), "nobody knows yet"
    cache[0] = mx.ones((1, 2))
    cache.advance(2)
    assert (transaction.can_begin(0), transaction.can_begin(1)) == (True, False)
    assert not bind_cache_rollback(clone_caches([cache])).can_begin(1)
    cache.record(lambda arrays, kept: arrays)
    assert transaction.can_begin(1)
    batch = merge_caches([cache, RecurrentCache(1)])
    assert bind_row_cache_rollback([batch], 2).can_begin(1)
    assert bind_row_cache_rollback([batch.extract(0)], 1).can_begin(1)


def test_a_loaded_recurrent_layer_gets_drafts_after_its_first_step(tmp_path):
    """A file does not say whether the layer that goes on tells how to replay: it shows in its next step."""
    cache = RecurrentCache(1)
    save_caches(tmp_path / "empty", [cache])
    assert bind_cache_rollback(load_caches(tmp_path / "empty").caches).can_begin(1), "as any new one"
    cache[0] = mx.ones((1, 2))
    cache.record(lambda arrays, kept: arrays)
    cache.advance(2)
    save_caches(tmp_path / "two", [cache, CacheList(cache)])
    caches = load_caches(tmp_path / "two").caches
    batch = make_row_batch([RecurrentCache(1)], max_rows=2)
    slot = batch.join_caches(caches[:1])
    assert (batch.spec_round_fits(0), batch.spec_round_fits(1)) == (True, False)
    assert not bind_row_cache_rollback([merge_caches([caches[0], RecurrentCache(1)])], 2).can_begin(1)
    for each in caches:
        transaction = bind_cache_rollback([each])
        assert (transaction.can_begin(0), transaction.can_begin(1)) == (True, False)
        own = each.caches[0] if isinstance(each, CacheList) else each
        own[0] = mx.zeros((1, 2))
        own.record(lambda arrays, kept: arrays)
        own.advance(1)
        assert transaction.can_begin(1)
    for view in batch.view([slot], 1):
        view[0] = mx.zeros((1, 2))
        view.record(lambda arrays, kept: arrays)
    batch.advance([slot], 1)
    assert batch.spec_round_fits(1)


def test_a_missing_replay_is_found_when_it_is_needed():
    """Full acceptance ends such a round; a rejection is a failed layer, and the caches must be discarded."""
    for accepted, is_valid in ((1, True), (0, False)):
        cache = RecurrentCache(1)
        transaction = bind_cache_rollback([cache])
        transaction.begin(1)
        cache[0] = mx.ones((1, 2))
        cache.advance(2)
        if is_valid:
            transaction.resolve(accepted)
            assert cache.offset == 2
            continue
        with pytest.raises(RoundRefusedError, match="replay"):
            transaction.resolve(accepted)
        with pytest.raises(StateInvalidError):
            transaction.can_begin(0)


def test_a_recurrent_row_of_a_round_steps_with_all_of_it():
    """Steps that mix rows of a round with others are refused before any kind of layer is touched."""
    run = drafting(Slots, "hybrid model", 3, 1)
    batch, slots = run.drafted.batch, run.drafted.slots
    run.step(5)
    outsider = next(slot for slot in batch.joined if slot not in slots)
    run.drafted.transaction.begin(2)
    for mixed in (slots[:2], sorted([*slots, outsider])):
        with pytest.raises(RoundRefusedError, match="all of its rows"):
            batch.view(mixed, 1)
    with pytest.raises(RoundRefusedError, match="open round"):
        batch.extract(slots[0])
    views = list(leaves(batch.view([outsider], 2)))
    for view in views:
        run_layer(view, [array[:1] for array in run.arrays(2)])
    batch.advance([outsider], 2)
    run.feed(run.arrays(3), [1, 2, 3], ())
    batch.check_integrity()
    run.drafted.resolve([0, 1, 2])
    run.check()
    assert batch.end(outsider) == 2


def test_layers_of_slots_share_what_says_which_positions_stay():
    """One `Kept` per step of a round, its arrays made once; the steps share the positions from the first on."""
    batch = make_row_batch([RecurrentCache(1), RecurrentCache(1)], max_rows=2)
    slots, told = [batch.join(), batch.join()], []

    def replay(arrays, kept):
        told.append(kept)
        return arrays

    batch.spec_round_begin(slots=slots)
    for _ in range(2):
        for view in batch.view(slots, 3):
            view[0] = mx.ones((2, 4))
            view.record(replay)
        batch.advance(slots, 3)
    batch.spec_round_rollback([2, 4])
    first, _, second, _ = told
    assert told == [first, first, second, second]
    assert first.counts == (2, 3)
    assert first.lengths.tolist() == [2, 3]
    assert second.mask(3).tolist() == [[False] * 3, [True, False, False]]
    assert first.mask(3, ndim=4).shape == (2, 3, 1, 1)
    assert first.mask(3, ndim=4) is first.mask(3, ndim=4)
    assert (batch.end(slots[0]), batch.end(slots[1])) == (2, 4)


@pytest.mark.parametrize("name", ["hybrid model", "sliding model"])
@pytest.mark.parametrize("accepts_all", [True, False])
def test_a_row_may_leave_in_a_round(name, accepts_all):
    """The other rows end the round as if it had never been there, also if somebody else takes its seat."""
    run = drafting(Slots, name, 3, 1)
    batch, slots = run.drafted.batch, run.drafted.slots
    run.step(6)
    batch.spec_round_begin(slots=slots)
    run.feed(run.arrays(3), [3, 3, 3] if accepts_all else [1, 3, 2], ())
    batch.leave(slots[1])
    newcomer = batch.join()
    assert newcomer == slots[1]
    if accepts_all:
        batch.spec_round_commit()
    else:
        batch.spec_round_rollback([1, 2])
    assert batch.end(newcomer) == 0
    batch.check_integrity()
    del run.clean[1], slots[1]
    run.check()
    run.step(1)
    run.check()


def test_rows_do_not_join_a_batch_in_a_round():
    """Extending would leave the new rows out of the round's books."""
    for make in (KVCache, lambda: RecurrentCache(1)):
        batch = merge_caches([make(), make()])
        batch.spec_round_begin()
        with pytest.raises(RoundRefusedError):
            batch.extend(merge_caches([make()]))
        batch.spec_round_commit()


def test_a_list_of_batches_keeps_all_or_none():
    """The trio of a list is that of its parts; what one part refuses changes no other."""
    run = drafting(Merged, "lists", 2, 1)
    run.step(6)
    lists = run.drafted.caches
    for each in lists:
        assert each.spec_round_fits(3)
        each.spec_round_begin()
    run.feed(run.arrays(4), [2, 4], ())
    for each in lists:
        with pytest.raises(InvalidCountError):
            each.spec_round_rollback([2, 5])
        assert each.is_in_round
        each.spec_round_rollback([2, 4])
        assert not each.is_in_round
    run.check()


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "name", "num_rows"), CASES, ids=NAMES)
def test_ten_thousand_rounds(kind, name, num_rows, dtype, request):
    """Ten thousand random rounds per kind, half of them per dtype, a fresh row every hundred."""
    random, done, refused, worst = np.random.default_rng(7), 0, 0, 0.0
    while done < 5000:
        run = drafting(kind, name, num_rows, int(random.integers(2**30)), DTYPES[dtype])
        run.step(int(random.integers(1, 30)))
        for _ in range(100):
            cuts = random.integers(1, 6, size=int(random.integers(0, 3))).tolist() if random.random() < 0.3 else ()
            run.round(int(random.integers(0, 6)), random.random(4).tolist(), cuts)
        run.check()
        done, refused = done + run.num_rounds + run.num_refused, refused + run.num_refused
        worst = max(worst, run.worst)
    print(f"\n{request.node.callspec.id}: {done} rounds, {refused} of them refused, largest difference {worst:.1e}")
