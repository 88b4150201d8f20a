"""Laws of the byte budget: nothing is lost, nothing locks up, and refusals change nothing."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvcache import (
    BudgetExceeded,
    CacheSpec,
    IntegrityError,
    InvalidLength,
    KVBudget,
    KVScheme,
    LayerSpec,
    batch_row_kv_bytes,
    kv_bytes_at,
)

TOTAL = 100
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["reserve", "extend", "close"]), st.integers(0, 70), st.integers(0, 70)), max_size=40
)


@settings(max_examples=100, deadline=None)
@given(ACTIONS)
def test_every_reservation_can_reach_its_ceiling_in_turn(actions):
    """After any schedule the oldest reaches its ceiling, then the next, and so on; a refusal changes nothing."""
    budget, held = KVBudget(TOTAL), []
    for action, number, more in actions:
        before = (budget.used_bytes, [(each.num_bytes, each.ceiling_bytes) for each in held])
        try:
            if action == "reserve":
                fits = budget.fits(number, ceiling_bytes=number + more)
                held.append(budget.reserve(number, ceiling_bytes=number + more))
                assert fits
            elif held and action == "extend":
                each = held[number % len(held)]
                each.extend(each.num_bytes + more)
            elif held:
                held.pop(number % len(held)).close()
        except BudgetExceeded:
            assert before == (budget.used_bytes, [(each.num_bytes, each.ceiling_bytes) for each in held])
        budget.check_integrity()
        assert budget.used_bytes + budget.free_bytes == TOTAL
        assert budget.num_reservations == len(held)
    for each in list(held):
        each.extend(each.ceiling_bytes)
        each.close()
        each.close()
        budget.check_integrity()
    assert budget.used_bytes == 0


def test_what_can_never_fit_is_told_apart_from_what_must_wait():
    """A row that waits gets in once another ends; one beyond the whole budget is refused for good."""
    budget = KVBudget(TOTAL)
    with budget.reserve(60):
        with pytest.raises(BudgetExceeded) as waiting:
            budget.reserve(50)
        with pytest.raises(BudgetExceeded) as hopeless:
            budget.reserve(10, ceiling_bytes=101)
        budget.refuse(100)
        assert (waiting.value.can_wait, waiting.value.free_bytes, hopeless.value.can_wait) == (True, 40, False)
    assert pickle.loads(pickle.dumps(waiting.value)).can_wait is True
    budget.reserve(50).release()
    assert budget.used_bytes == 0


def test_a_reservation_ends_with_its_block_whatever_happens():
    """The bytes come back also when the block fails, and a closed reservation cannot grow."""
    budget = KVBudget(TOTAL)
    with pytest.raises(ZeroDivisionError), budget.reserve(5) as reservation:
        raise ZeroDivisionError
    assert (budget.used_bytes, reservation.is_open, reservation.num_bytes) == (0, False, 0)
    with pytest.raises(InvalidLength):
        reservation.extend(6)


@pytest.mark.parametrize("value", [-1, 1.0, True])
def test_counts_are_checked(value):
    """A number of bytes is an integer of at least 0."""
    budget = KVBudget(TOTAL)
    with pytest.raises(InvalidLength):
        KVBudget(value)
    with pytest.raises(InvalidLength):
        budget.reserve(value)
    with pytest.raises(InvalidLength):
        budget.reserve(0, ceiling_bytes=value)
    with budget.reserve(3) as reservation, pytest.raises(InvalidLength):
        reservation.extend(2)
    with pytest.raises(InvalidLength):
        budget.reserve(5, ceiling_bytes=4)


def test_books_that_do_not_agree_are_a_defect():
    """The check sees bytes that no reservation holds."""
    budget = KVBudget(TOTAL)
    budget._used_bytes = 1
    with pytest.raises(IntegrityError):
        budget.check_integrity()


def test_the_projection_is_the_schemes_own_formula():
    """`batch_row_kv_bytes` is `bytes_at` of prompt and reply together (K-32)."""
    spec = CacheSpec(layers=[LayerSpec(num_kv_heads=2, key_head_dim=64, value_head_dim=64)], dtype="bfloat16")
    scheme = KVScheme.uniform(4)
    assert batch_row_kv_bytes(spec, 200, 100) == kv_bytes_at(spec, 300)
    assert batch_row_kv_bytes(spec, 200, 100, scheme) == scheme.bytes_at(spec, 300) < kv_bytes_at(spec, 300) / 3
