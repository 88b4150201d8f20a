"""Laws of `TextStream`."""

import codecs
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_scheduling.testing import FakeDecoder
from headrace_scheduling.text import TextStream

_ALPHABET = "abcé☃𝄞"
_TEXTS = st.text(_ALPHABET, max_size=24)
_STOPS = st.lists(st.text(_ALPHABET, min_size=1, max_size=4), max_size=3)


def _cut_at_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The obvious reference: the leftmost match over the whole text, the shortest of those that start there."""
    matches = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not matches:
        return text, None
    index, _, stop = min(matches)
    return text[:index], stop


def _run(data: bytes, cuts: list[int], stops: list[str]) -> tuple[str, str | None, list[str]]:
    stream = TextStream(FakeDecoder(), tuple(stops))
    pieces = []
    bounds = [0, *sorted(cuts), len(data)]
    for begin, end in itertools.pairwise(bounds):
        pieces.append(stream.push(tuple(data[begin:end])).text)
        if stream.matched_stop is not None:
            break
    pieces.append(stream.flush().text)
    return "".join(pieces), stream.matched_stop, pieces


@given(text=_TEXTS, stops=_STOPS, data=st.data())
def test_text_is_cut_at_the_leftmost_stop_however_tokens_fall(text, stops, data):
    """Law: the delivered text and the reported stop depend on the whole text alone, not on token borders."""
    encoded = text.encode()
    cuts = data.draw(st.lists(st.integers(0, len(encoded)), max_size=8))
    delivered, matched, _ = _run(encoded, cuts, stops)
    expected, stop = _cut_at_stop(text, stops)
    assert (delivered, matched) == (expected, stop)


@given(text=_TEXTS)
def test_no_delta_ends_inside_a_character(text):
    """Law: one byte a token, no delta holds half a character and together they are the text."""
    encoded = text.encode()
    delivered, _, pieces = _run(encoded, list(range(len(encoded))), [])
    assert delivered == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_bytes_that_never_become_a_character_are_dropped_at_the_end():
    """Law: an unfinished character yields no text."""
    stream = TextStream(FakeDecoder())
    assert stream.push(tuple("é".encode()[:1])).text == ""
    assert stream.flush().text == ""


def test_a_possible_stop_is_held_back_and_released_when_it_cannot_be_one():
    """Law: nothing of a stop string is delivered before it is decided, and nothing else waits."""
    stream = TextStream(FakeDecoder(), ("STOP",))
    assert stream.push(tuple(b"go ST")).text == "go "
    assert stream.push(tuple(b"A")).text == "STA"
    assert stream.push(tuple(b"STO")).text == ""
    assert stream.flush().text == "STO"
    assert stream.matched_stop is None


def test_an_earlier_start_wins_over_an_earlier_end():
    """Law: while a longer stop string that started earlier is open, a complete one inside it waits."""
    stream = TextStream(FakeDecoder(), ("abcd", "bc"))
    assert stream.push(tuple(b"xabc")).text == "x"
    assert stream.matched_stop is None
    assert stream.push(tuple(b"d")).text == ""
    assert stream.matched_stop == "abcd"
    other = TextStream(FakeDecoder(), ("abcd", "bc"))
    assert other.push(tuple(b"xabc")).text + other.push(tuple(b"e")).text == "xa"
    assert other.matched_stop == "bc"


def test_tokens_are_reported_with_the_delta_that_consumed_them():
    """Law: a delta names the tokens it consumed, whether or not their text is out yet."""
    stream = TextStream(FakeDecoder(), ("b",))
    assert stream.push((97,)).token_ids == (97,)
    assert stream.push((98,)).token_ids == (98,)
    after = stream.push((99,))
    assert (after.text, after.token_ids) == ("", (99,))
    assert stream.flush().text == ""


def test_the_decoder_s_rest_can_complete_a_stop_string():
    """Law: text that the decoder only releases at the end is matched too."""

    class LateDecoder:
        def push(self, token_ids):
            return ""

        def flush(self):
            return "endSTOPmore"

    stream = TextStream(LateDecoder(), ("STOP",))
    stream.push((1,))
    assert stream.flush().text == "end"
    assert stream.matched_stop == "STOP"


@pytest.mark.parametrize("name", ["utf-8"])
def test_the_fake_decoder_is_an_incremental_decoder(name):
    """Law: the fake decodes bytes as the standard library does."""
    data = "a☃b".encode()
    decoder = FakeDecoder()
    assert "".join(decoder.push((byte,)) for byte in data) + decoder.flush() == codecs.decode(data, name)
