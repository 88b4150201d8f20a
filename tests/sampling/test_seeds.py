"""Seeds and keys as integers."""

from hypothesis import given
from hypothesis import strategies as st

from headrace_sampling import default_seed, mix_seed, step_key

SEEDS = st.integers(0, 2**64 - 1)


@given(SEEDS, st.integers(0, 2**20))
def test_a_step_key_is_the_seed_and_the_golden_multiple(seed, step):
    """Key = seed XOR ((step + 1) * 0x9e3779b97f4a7c15) modulo 2**64, an involution in the seed."""
    key = step_key(seed, step)
    assert 0 <= key < 2**64
    assert key == seed ^ ((step + 1) * 0x9E3779B97F4A7C15 % 2**64)
    assert step_key(key, step) == seed


@given(SEEDS)
def test_choice_zero_draws_from_the_seed_itself(seed):
    """Choices of one request are unrelated, the first is the request without choices."""
    assert mix_seed(seed, 0) == seed
    assert len({mix_seed(seed, index) for index in range(64)}) == 64


def test_fresh_seeds_differ_and_survive_json():
    """Equal prompts in the same millisecond differ; a seed is exact as a double."""
    seeds = {default_seed() for _ in range(1000)}
    assert len(seeds) == 1000
    assert all(int(float(seed)) == seed for seed in seeds)
