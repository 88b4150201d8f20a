"""Local agreement: what was stable stays."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_http_api.audio.agreement import Agreement, text_of

EVER = float("inf")
VOCABULARY = ["a", "b", "c", "d.", "D", "e,"]


def timed(make_word, texts, *, first_s=0.0, each_s=0.5):
    return [
        make_word(f" {text}", first_s + place * each_s, first_s + (place + 1) * each_s)
        for place, text in enumerate(texts)
    ]


HYPOTHESES = st.lists(
    st.tuples(st.lists(st.sampled_from(VOCABULARY), max_size=8), st.floats(0, 3)), min_size=1, max_size=8
)


@settings(max_examples=100, deadline=None)
@given(HYPOTHESES, st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_what_was_stable_stays_a_prefix(make_word, hypotheses, releases):
    """Whatever is heard: everything released, followed by what is stable, only grows at its end."""
    agreement, released, before = Agreement(), [], []
    for (texts, first_s), count in zip(hypotheses, releases, strict=False):
        agreement.update(timed(make_word, texts, first_s=first_s), EVER)
        now = released + agreement.stable
        assert now[: len(before)] == before
        said = text_of([*agreement.stable, *agreement.tentative])
        assert said.startswith(text_of(agreement.stable))
        released, before = released + agreement.release(min(count, len(agreement.stable))), now
        assert released + agreement.stable == now
    agreement.settle()
    assert (released + agreement.stable)[: len(before)] == before
    assert agreement.tentative == []


@settings(max_examples=100, deadline=None)
@given(HYPOTHESES)
def test_a_word_becomes_stable_only_when_two_in_a_row_have_it(make_word, hypotheses):
    """Never from one hypothesis alone."""
    agreement, previous = Agreement(), []
    for texts, first_s in hypotheses:
        fresh = agreement.update(timed(make_word, texts, first_s=first_s), EVER)
        plain = [word.text.strip(" .,").lower() for word in fresh]
        assert all(any(one == text.strip(".,").lower() for text in previous) for one in plain)
        previous = texts


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=12, unique=True),
    st.lists(st.tuples(st.integers(0, 12), st.lists(st.sampled_from(["x", "y", "z"]), max_size=3)), max_size=10),
)
def test_garbage_at_the_end_never_becomes_stable(make_word, truth, steps):
    """Hypotheses that are right but for an end of their own each: what is stable is right, and all is at the end."""
    agreement, length = Agreement(), 0
    for number, (more, garbage) in enumerate(steps):
        length = min(len(truth), max(length, more))
        # Each one guesses its own end.
        guessed = [f"{text}{number}" for text in garbage]
        agreement.update(timed(make_word, [*truth[:length], *guessed]), EVER)
        right = timed(make_word, truth)[: len(agreement.stable)]
        assert [word.text for word in agreement.stable] == [word.text for word in right]
    agreement.update(timed(make_word, truth), EVER)
    agreement.settle()
    assert text_of(agreement.stable) == text_of(timed(make_word, truth))


def test_spelling_is_that_of_the_second(make_word):
    """Case and punctuation do not keep words from being stable."""
    agreement = Agreement()
    agreement.update(timed(make_word, ["hello", "World"]), EVER)
    agreement.update(timed(make_word, ["Hello,", "world", "again"]), EVER)

    assert text_of(agreement.stable) == " Hello, world"
    assert text_of(agreement.tentative) == " again"


@pytest.mark.parametrize("shift_s", [0.0, 0.3])
def test_words_that_were_released_are_not_said_again(make_word, shift_s):
    """After a cut the audio may begin with the end of what is final: times tell, or else the words."""
    agreement = Agreement()
    agreement.update(timed(make_word, ["one", "two", "three"]), EVER)
    agreement.settle()
    agreement.release(3)

    agreement.update(timed(make_word, ["three", "four"], first_s=1.0 + 2 * shift_s), EVER)

    assert text_of(agreement.tentative) == " four"


def test_a_word_may_be_said_twice_after_a_pause(make_word):
    """What is apart is no repetition."""
    agreement = Agreement()
    agreement.update(timed(make_word, ["no"]), EVER)
    agreement.settle()
    agreement.release(1)
    agreement.forget()

    agreement.update(timed(make_word, ["no"], first_s=5.0), EVER)

    assert text_of(agreement.tentative) == " no"


def test_young_words_wait(make_word):
    """Two that agree are not enough while a word has just been said; older ones before it are stable."""
    agreement, said = Agreement(), timed(make_word, ["one", "two", "three"])
    agreement.update(said, 0.0)
    agreement.update(said, 1.0)

    assert (text_of(agreement.stable), text_of(agreement.tentative)) == (" one two", " three")

    agreement.update(said, 1.5)

    assert (text_of(agreement.stable), text_of(agreement.tentative)) == (" one two three", "")
