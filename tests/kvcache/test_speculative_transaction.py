"""The life of a round: every state times every call times valid, invalid and failing (invariant 9, K-91 to K-93)."""

import copy

import pytest

from headrace_kvcache import (
    IncompleteRoundError,
    IntegrityError,
    InvalidCountError,
    KVCacheError,
    RoundRefusedError,
    StateInvalidError,
    bind_cache_rollback,
    bind_row_cache_rollback,
)

ROWS = 3
BAD_COUNTS = (-1, True, 1.0, "1", None, 2**70 * -1)


class Recorder:
    """A cache with the trio that notes its calls and can be told to fail in one of them."""

    def __init__(self, log, name):
        self.log, self.name = log, name
        self.fails_in, self.has_room = None, True

    def note(self, call, *arguments):
        self.log.append((self.name, call, *arguments))
        if call == self.fails_in:
            raise OSError("the device is gone")

    def spec_round_fits(self, drafts):
        return self.has_room

    def spec_round_begin(self):
        self.note("begin")

    def spec_round_commit(self):
        self.note("commit")

    def spec_round_rollback(self, keep):
        self.note("rollback", keep)


class Trimmable:
    """A cache that only forgets its last positions."""

    def __init__(self, log, name, *, is_trimmable=True):
        self.log, self.name, self.trimmable, self.fails_in = log, name, is_trimmable, None

    def is_trimmable(self):
        return self.trimmable

    def trim(self, count):
        self.log.append((self.name, "trim", count))
        if self.fails_in == "trim":
            raise OSError("the device is gone")
        return count


class Scalar:
    """Three caches of one row; an acceptance is a number."""

    bad_acceptances = (*BAD_COUNTS, 4, [1])
    good_acceptance = 2
    resolved = (("a", "rollback", 3), ("b", "trim", 1), ("c", "rollback", 3))

    def __init__(self):
        self.log = []
        self.caches = [Recorder(self.log, "a"), Trimmable(self.log, "b"), Recorder(self.log, "c")]
        self.transaction = bind_cache_rollback(self.caches)


class Rows:
    """Three batched caches; an acceptance is a number per row."""

    bad_acceptances = (
        [1, 1],
        [1, 1, 1, 1],
        [1, 1, 4],
        [1, -1, 1],
        [1, True, 1],
        [1, 1.0, 1],
        2,
        None,
        "111",
        {1, 2, 3},
    )
    good_acceptance = (2, 0, 3)
    resolved = tuple((name, "rollback", [3, 1, 4]) for name in "abc")

    def __init__(self):
        self.log = []
        self.caches = [Recorder(self.log, name) for name in "abc"]
        self.transaction = bind_row_cache_rollback(self.caches, ROWS)


BINDINGS = (Scalar, Rows)
STATES = ("idle", "idle again", "open", "failed in begin", "failed in resolve")


def brought_to(binding, state):
    """Return a bound transaction in a state, its log emptied."""
    bound = binding()
    if state in ("idle again", "open", "failed in resolve"):
        bound.transaction.begin(3)
    if state == "idle again":
        bound.transaction.resolve(bound.good_acceptance)
    if state == "failed in begin":
        bound.caches[2].fails_in = "begin"
        with pytest.raises(OSError, match="gone"):
            bound.transaction.begin(3)
    if state == "failed in resolve":
        bound.caches[2].fails_in = "rollback"
        with pytest.raises(OSError, match="gone"):
            bound.transaction.resolve(bound.good_acceptance)
    bound.caches[2].fails_in = None
    bound.log.clear()
    return bound


def check_still(bound, state):
    """Whatever was refused or asked, no layer was called and the state is the same."""
    assert bound.log == []
    assert bound.transaction.is_valid == (not state.startswith("failed"))
    bound.transaction.check_integrity()
    if state == "open":
        assert bound.transaction.drafts == 3
        bound.transaction.resolve(bound.good_acceptance)
        assert bound.log == list(bound.resolved)
    elif state.startswith("idle"):
        assert bound.transaction.drafts is None
        bound.transaction.begin(3)


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("drafts", [0, 3, *BAD_COUNTS], ids=repr)
def test_can_begin_answers_and_changes_nothing(binding, state, drafts):
    """Invalid state first, then invalid count, then whether no round is open and every layer has room."""
    bound = brought_to(binding, state)
    if state.startswith("failed"):
        with pytest.raises(StateInvalidError, match="discarded"):
            bound.transaction.can_begin(drafts)
    elif type(drafts) is not int or drafts < 0:
        with pytest.raises(InvalidCountError):
            bound.transaction.can_begin(drafts)
    else:
        assert bound.transaction.can_begin(drafts) == (state != "open")
    check_still(bound, state)


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize("state", STATES)
def test_begin_with_an_invalid_count(binding, state):
    """The state's own error wins; a refused count changes nothing."""
    for drafts in BAD_COUNTS:
        bound = brought_to(binding, state)
        with pytest.raises(StateInvalidError if state.startswith("failed") else InvalidCountError):
            bound.transaction.begin(drafts)
        check_still(bound, state)


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize("state", STATES)
def test_begin_without_room(binding, state):
    """A layer without room refuses the round before any layer is begun, and nothing is invalid for it."""
    bound = brought_to(binding, state)
    bound.caches[2].has_room = False
    if not state.startswith("failed"):
        assert not bound.transaction.can_begin(3)
    with pytest.raises(StateInvalidError if state.startswith("failed") else RoundRefusedError):
        bound.transaction.begin(3)
    bound.caches[2].has_room = True
    check_still(bound, state)


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize("state", STATES)
def test_begin_with_a_valid_count(binding, state):
    """Begins all layers in order if no round is open; an open round and a failed state refuse."""
    bound = brought_to(binding, state)
    if not state.startswith("idle"):
        with pytest.raises(StateInvalidError if state.startswith("failed") else RoundRefusedError):
            bound.transaction.begin(3)
        check_still(bound, state)
        return
    bound.transaction.begin(3)
    assert [entry for entry in bound.log if entry[1] == "begin"] == bound.log
    assert [name for name, _ in bound.log] == [each.name for each in bound.caches if isinstance(each, Recorder)]
    assert bound.transaction.drafts == 3


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("failing", [0, 2])
def test_begin_with_a_failing_layer(binding, state, failing):
    """The layer's own error comes out, the layers after it are not begun, and the state is invalid for ever."""
    bound = brought_to(binding, state)
    bound.caches[failing].fails_in = "begin"
    if not state.startswith("idle"):
        with pytest.raises(StateInvalidError if state.startswith("failed") else RoundRefusedError):
            bound.transaction.begin(3)
        check_still(bound, state)
        return
    with pytest.raises(OSError, match="gone"):
        bound.transaction.begin(3)
    assert bound.log[-1] == (bound.caches[failing].name, "begin")
    check_invalid(bound)


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize("state", STATES)
def test_resolve_with_an_invalid_acceptance(binding, state):
    """The round stays open and a correct resolve may follow; without a round nothing is acceptable."""
    for accepted in binding.bad_acceptances:
        bound = brought_to(binding, state)
        with pytest.raises(StateInvalidError if state.startswith("failed") else InvalidCountError):
            bound.transaction.resolve(accepted)
        check_still(bound, state)


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize("state", STATES)
def test_resolve_with_a_valid_acceptance(binding, state):
    """Ends the round in all layers, keeping the pending token and what was accepted."""
    bound = brought_to(binding, state)
    if state != "open":
        with pytest.raises(StateInvalidError if state.startswith("failed") else InvalidCountError):
            bound.transaction.resolve(bound.good_acceptance)
        check_still(bound, state)
        return
    bound.transaction.resolve(bound.good_acceptance)
    assert bound.log == list(bound.resolved)
    assert bound.transaction.drafts is None
    assert bound.transaction.can_begin(3)


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_resolve_with_a_failing_layer(binding, state, failing):
    """The layer's own error comes out, the layers after it are not ended, and the state is invalid for ever."""
    bound = brought_to(binding, state)
    cache = bound.caches[failing]
    cache.fails_in = "trim" if isinstance(cache, Trimmable) else "rollback"
    if state != "open":
        with pytest.raises(StateInvalidError if state.startswith("failed") else InvalidCountError):
            bound.transaction.resolve(bound.good_acceptance)
        check_still(bound, state)
        return
    with pytest.raises(OSError, match="gone"):
        bound.transaction.resolve(bound.good_acceptance)
    assert bound.log == list(bound.resolved[: failing + 1])
    assert bound.transaction.drafts == 3
    check_invalid(bound)


def check_invalid(bound):
    bound.log.clear()
    for each in bound.caches:
        each.fails_in = None
    calls = (
        lambda: bound.transaction.can_begin(0),
        lambda: bound.transaction.begin(0),
        lambda: bound.transaction.resolve(bound.good_acceptance),
    )
    for _ in range(2):
        for call in calls:
            with pytest.raises(StateInvalidError, match="OSError"):
                call()
    assert bound.log == []


class NotANormalError(BaseException):
    """Like the cancellation of a task."""


def test_a_cancellation_in_the_middle_invalidates_too():
    """Whatever ends a layer's call half-way leaves layers that disagree."""
    bound = Scalar()
    bound.caches[2].note = lambda *_: (_ for _ in ()).throw(NotANormalError)
    with pytest.raises(NotANormalError):
        bound.transaction.begin(1)
    assert not bound.transaction.is_valid


SCALAR_RESOLVED = {
    (3, 0): [("a", "rollback", 1), ("b", "trim", 3), ("c", "rollback", 1)],
    (3, 2): [("a", "rollback", 3), ("b", "trim", 1), ("c", "rollback", 3)],
    (3, 3): [("a", "commit"), ("c", "commit")],
    (0, 0): [("a", "commit"), ("c", "commit")],
}


@pytest.mark.parametrize(("drafts", "accepted"), SCALAR_RESOLVED)
def test_what_the_scalar_binding_tells_each_cache(drafts, accepted):
    """Round caches keep accepted + 1, trimmable ones forget the rest, and full acceptance trims nothing (K-92)."""
    bound = Scalar()
    bound.transaction.begin(drafts)
    assert bound.log == [("a", "begin"), ("c", "begin")]
    bound.log.clear()
    bound.transaction.resolve(accepted)
    assert bound.log == SCALAR_RESOLVED[drafts, accepted]


ROWS_RESOLVED = {
    (3, (3, 3, 3)): ("commit",),
    (3, (1, 1, 1)): ("rollback", 2),
    (3, (0, 0, 0)): ("rollback", 1),
    (3, (0, 3, 1)): ("rollback", [1, 4, 2]),
    (0, (0, 0, 0)): None,
}


@pytest.mark.parametrize(("drafts", "accepted"), ROWS_RESOLVED)
@pytest.mark.parametrize("as_list", [True, False])
def test_what_the_row_binding_tells_each_cache(drafts, accepted, as_list):
    """One number if rows agree, one per row if not; a round without drafts arms nothing (K-93)."""
    bound, expected = Rows(), ROWS_RESOLVED[drafts, accepted]
    bound.transaction.begin(drafts)
    assert bound.log == ([(name, "begin") for name in "abc"] if drafts else [])
    bound.log.clear()
    bound.transaction.resolve(list(accepted) if as_list else accepted)
    assert bound.log == ([] if expected is None else [(name, *expected) for name in "abc"])


@pytest.mark.parametrize("accepted", range(4))
def test_scalar_and_row_bindings_agree_when_rows_do(accepted):
    """For uniform acceptance the same cache hears the same calls."""
    logs = []
    for bind, acceptance in (
        (bind_cache_rollback, accepted),
        (lambda c: bind_row_cache_rollback(c, 2), [accepted] * 2),
    ):
        log = []
        transaction = bind([Recorder(log, "a")])
        transaction.begin(3)
        transaction.resolve(acceptance)
        logs.append(log)
    assert logs[0] == logs[1]


class Ring:
    """A foreign ring: it forgets its last positions as long as it has not wrapped."""

    def __init__(self, offset, max_size, **members):
        self.offset, self.max_size = offset, max_size
        for name, member in members.items():
            setattr(self, name, member)

    def is_trimmable(self):
        return True

    def trim(self, count):
        self.offset -= count
        return count


TRIO = dict.fromkeys(("spec_round_begin", "spec_round_commit", "spec_round_rollback"), lambda *_: None)

CAPACITY = {
    "a ring, one position left": (Ring(27, 32), 3, True),
    "a ring at equality": (Ring(28, 32), 3, False),
    "a ring past it": (Ring(40, 32), 0, False),
    "a ring with the trio is judged by its size": (Ring(28, 32, **TRIO), 3, False),
    "what is declared wins over the size": (Ring(28, 32, spec_round_fits=lambda drafts: drafts == 3, **TRIO), 3, True),
    "and the other way": (Ring(0, 32, spec_round_fits=lambda _: False, **TRIO), 0, False),
    "declared without the trio": (Ring(28, 32, spec_round_fits=lambda _: True), 3, True),
    "a size that is no integer is no size": (Ring(99, 32.0), 3, True),
    "no size": (Ring(99, None), 3, True),
    "an offset per row": (Ring([1, 2], 32), 3, False),
    "a trimmable cache": (Trimmable([], "a"), 99, True),
    "a cache that is not": (Trimmable([], "a", is_trimmable=False), 0, False),
    "the trio alone": (type("Bare", (), {name: staticmethod(call) for name, call in TRIO.items()})(), 99, True),
    "nothing at all": (object(), 0, False),
}


@pytest.mark.parametrize(("cache", "drafts", "fits"), CAPACITY.values(), ids=CAPACITY)
def test_the_first_rule_that_applies_decides_whether_drafts_fit(cache, drafts, fits):
    """`spec_round_fits`, then offset + drafts + 1 < max_size, then the trio or is_trimmable (ruling K-92a)."""
    transaction = bind_cache_rollback([cache])
    assert transaction.can_begin(drafts) is fits
    if not fits:
        with pytest.raises(RoundRefusedError, match=r"layers \[0\]"):
            transaction.begin(drafts)
        assert transaction.is_valid


def test_the_room_of_a_ring_is_asked_before_every_round():
    """Binding once is enough: as the ring fills, later rounds are refused."""
    ring = Ring(0, 12)
    transaction = bind_cache_rollback([ring])
    rounds = 0
    while transaction.can_begin(2):
        transaction.begin(2)
        ring.offset += 3
        transaction.resolve(1)
        rounds += 1
    assert (rounds, ring.offset) == (5, 10)


@pytest.mark.parametrize("missing", TRIO)
@pytest.mark.parametrize("bind", [bind_cache_rollback, lambda caches: bind_row_cache_rollback(caches, 1)])
@pytest.mark.parametrize("in_list", [False, True])
def test_a_part_of_the_trio_is_refused_at_bind(missing, bind, in_list):
    """The error names what is there and what is not, also within a list of caches."""
    members = {name: staticmethod(call) for name, call in TRIO.items() if name != missing}
    cache = type("Partly", (), members)()
    if in_list:
        cache = type("List", (), {"caches": (cache,)})()
    with pytest.raises(IncompleteRoundError, match=f"Partly.*not {missing}") as caught:
        bind([cache])
    assert isinstance(caught.value, TypeError)


def test_rows_need_the_trio():
    """A batch that can only be trimmed as a whole cannot keep different numbers per row."""
    with pytest.raises(IncompleteRoundError, match="Trimmable"):
        bind_row_cache_rollback([Trimmable([], "a")], 2)


@pytest.mark.parametrize("rows", [0, -1, True, 1.0, None])
def test_rows_are_counted(rows):
    """The number of rows is an integer of at least 1, and that of the slots."""
    with pytest.raises(InvalidCountError):
        bind_row_cache_rollback([Recorder([], "a")], rows)
    with pytest.raises(InvalidCountError):
        bind_row_cache_rollback([Recorder([], "a")], 2, slots=[1])


def test_a_list_is_asked_part_by_part():
    """Parts of a composite cache have their own rounds, nested ones too."""
    log = []
    inner = type("List", (), {"caches": (Recorder(log, "b"), Trimmable(log, "c"))})()
    outer = type("List", (), {"caches": (Recorder(log, "a"), inner)})()
    transaction = bind_cache_rollback([outer])
    transaction.begin(1)
    transaction.resolve(0)
    assert log == [("a", "begin"), ("b", "begin"), ("a", "rollback", 1), ("b", "rollback", 1), ("c", "trim", 1)]


def test_a_foreign_cache_that_forgets_too_little_invalidates():
    """mlx-lm's `trim` may do nothing and say so with 0: that is a failed layer, not a success."""
    cache = Trimmable([], "a")
    cache.trim = lambda _: 0
    transaction = bind_cache_rollback([cache])
    transaction.begin(2)
    with pytest.raises(RoundRefusedError, match="forgot 0"):
        transaction.resolve(0)
    assert not transaction.is_valid


def test_members_are_looked_up_once():
    """A cache whose attributes are costly is asked for its calls at bind alone."""
    asked = []

    class Watched(Recorder):
        def __getattribute__(self, name):
            if name.startswith("spec_round"):
                asked.append(name)
            return super().__getattribute__(name)

    transaction = bind_cache_rollback([Watched([], "a")])
    asked.clear()
    for _ in range(3):
        transaction.begin(2)
        transaction.resolve(1)
    assert asked == []


def test_books_and_layers_must_agree():
    """`check_integrity` finds a layer that somebody else began or ended."""

    class Counted(Recorder):
        is_in_round = False

    cache = Counted([], "a")
    transaction = bind_cache_rollback([cache])
    transaction.check_integrity()
    cache.is_in_round = True
    with pytest.raises(IntegrityError, match="not begun"):
        transaction.check_integrity()
    transaction.begin(2)
    transaction.check_integrity()
    cache.is_in_round = False
    with pytest.raises(IntegrityError, match="left"):
        transaction.check_integrity()


@pytest.mark.parametrize("error", [IncompleteRoundError, InvalidCountError, RoundRefusedError, StateInvalidError])
def test_errors_are_typed_and_travel(error):
    """They are this package's, the built-in of ruling K-92a, and survive being copied to another process."""
    builtin = {IncompleteRoundError: TypeError, InvalidCountError: ValueError}.get(error, RuntimeError)
    assert issubclass(error, KVCacheError)
    assert issubclass(error, builtin)
    assert str(copy.copy(error("why"))) == "why"
