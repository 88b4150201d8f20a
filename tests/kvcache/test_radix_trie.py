"""Laws of the radix trie, against a list of keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_kvcache import IntegrityError, InvalidPrefix
from headrace_kvcache.radix_trie import RadixTrie, key_of, tokens_of

TOKENS = st.lists(st.integers(0, 2), max_size=9).map(tuple)


def num_shared(one, other):
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


@given(st.lists(st.tuples(TOKENS, st.booleans()), max_size=25), TOKENS)
def test_a_trie_answers_as_a_list_of_keys_does(changes, asked):
    """Insertions and removals in any order: values, ancestors and groups by shared length are those of the list."""
    trie, naive = RadixTrie(), {}
    for number, (tokens, is_removed) in enumerate(changes):
        if is_removed and tokens in naive:
            trie.remove(key_of(tokens))
            del naive[tokens]
        else:
            trie.insert(key_of(tokens), number)
            naive[tokens] = number
        trie.check_integrity()
    assert {tokens_of(key): value for key, value in trie.items()} == naive
    assert trie.is_empty == (not naive)
    assert trie.get(key_of(asked)) == naive.get(asked)
    ancestors = sorted((tokens for tokens in naive if tokens == asked[: len(tokens)] and tokens != asked), key=len)
    assert trie.ancestors(key_of(asked)) == [naive[tokens] for tokens in ancestors]
    groups = [(length, sorted(values)) for length, values in trie.matches(key_of(asked))]
    expected = {}
    for tokens, value in naive.items():
        if num_shared(tokens, asked):
            expected.setdefault(num_shared(tokens, asked), []).append(value)
    assert [group for group in groups if group[1]] == [
        (length, sorted(expected[length])) for length in sorted(expected, reverse=True)
    ]


@given(st.integers(0, 700), st.integers(0, 700), st.integers(0, 700))
def test_long_edges_are_cut_at_the_first_token_that_differs(shared, one, other):
    """Two long runs share exactly what they share, at whatever place they part."""
    trie = RadixTrie()
    stem = tuple(range(shared))
    trie.insert(key_of(stem + (-1,) * one), "one")
    groups = [(length, list(values)) for length, values in trie.matches(key_of(stem + (-2,) * other))]
    assert groups == ([(shared, ["one"])] if shared else [])


def test_what_is_no_token_and_what_is_not_there_is_refused():
    """Keys are made of integers of 64 bits, and removing nothing is a defect."""
    for tokens in ([1.5], ["1"], [None], [1 << 63]):
        with pytest.raises(InvalidPrefix, match="64 bits"):
            key_of(tokens)
    assert tokens_of(key_of([0, -1, (1 << 63) - 1])) == (0, -1, (1 << 63) - 1)
    trie = RadixTrie()
    trie.insert(key_of([1, 2]), "value")
    for tokens in ([1], [1, 2, 3], [2]):
        with pytest.raises(IntegrityError):
            trie.remove(key_of(tokens))
