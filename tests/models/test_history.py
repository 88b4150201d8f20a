"""Generated ids come back for their text, exactly or not at all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_models.history import TokenHistory

# A tokenizer with two spellings: 1 is "a", 2 is "b", 3 is "ab"; encoding prefers the long one.
PIECES = {0: "\ufffd", 1: "a", 2: "b", 3: "ab", 4: "c"}


def encode(text):
    ids = []
    while text:
        token_id = max((i for i in PIECES if text.startswith(PIECES[i])), key=lambda i: len(PIECES[i]))
        ids.append(token_id)
        text = text[len(PIECES[token_id]) :]
    return ids


def decode(ids):
    return "".join(PIECES[i] for i in ids)


def make(**limits):
    return TokenHistory(encode, decode, **limits)


IDS = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(generated=IDS, follow_up=IDS)
def test_what_was_generated_is_found_again(generated, follow_up):
    """Invariant 27: however a text was spelled, its continuation starts with the ids that spelled it."""
    history = make()
    history.remember(generated)
    rendered = decode(generated) + "c" + decode(follow_up)
    resolved = history.resolve(rendered, encode(rendered))
    assert resolved[: len(generated)] == generated
    assert decode(resolved) == rendered


@settings(max_examples=200, deadline=None)
@given(stored=st.lists(IDS, max_size=5), text=IDS)
def test_a_resolved_prompt_always_spells_the_rendering(stored, text):
    """Whatever is stored, the ids of a prompt decode to that prompt."""
    history = make()
    for ids in stored:
        history.remember(ids)
    rendered = decode(text)
    assert decode(history.resolve(rendered, encode(rendered))) == rendered


def test_the_longest_strict_prefix_is_used_and_equal_ids_are_left_alone():
    """Of several texts the longest counts, the whole rendering is no prefix of itself, and agreeing ids stay."""
    history = make()
    for ids in ([1, 2], [1, 2, 1, 2], [1, 2, 1, 2, 4, 1]):
        history.remember(ids)
    assert history.resolve("ababca", encode("ababca")) == [1, 2, 1, 2, 4, 1]
    assert history.resolve("ababca" + "c", encode("ababcac")) == [1, 2, 1, 2, 4, 1, 4]
    assert history.resolve("abab", encode("abab")) == [1, 2, 3]
    agreeing = make()
    agreeing.remember([3])
    canonical = encode("abc")
    assert agreeing.resolve("abc", canonical) is canonical


def test_a_rest_that_does_not_round_trip_falls_back():
    """Invariant 27: ids that would not decode to the rendering are never used."""
    history = TokenHistory(lambda text: encode(text)[1:], decode)
    history.remember([1, 2])
    canonical = encode("abcab")
    assert history.resolve("abcab", canonical) is canonical


def test_half_characters_and_empty_texts_are_not_stored():
    """A text that ends in a replacement character would match texts that it is not."""
    history = make()
    for ids in ([1, 2, 0], []):
        history.remember(ids)
    assert not history._entries


@pytest.mark.parametrize(
    ("limits", "num_kept"), [({"max_entries": 2}, 2), ({"max_chars": 7}, 2), ({"max_chars": 2}, 0)]
)
def test_the_least_recently_used_texts_go_first(limits, num_kept):
    """Entries and characters are both limited; using an entry keeps it."""
    history = make(**limits)
    history.remember([1, 2, 4])
    history.remember([1, 1, 4])
    history.resolve("abcc", encode("abcc"))
    history.remember([2, 2, 4])
    history.remember([2, 2, 4])
    assert list(history._entries) == ["abc", "bbc"][-num_kept:] * bool(num_kept)
    assert history._num_chars == sum(map(len, history._entries))
