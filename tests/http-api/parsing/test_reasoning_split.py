"""Reasoning apart from answers: where markers count, what white space belongs to them, what is never lost."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_http_api.parsing.parts import ContentDelta, collect, parse_all
from headrace_http_api.parsing.reasoning import REASONING_FORMATS, find_reasoning_format
from headrace_http_api.parsing.selection import select_parser

NAMES = [entry.name for entry in REASONING_FORMATS]


def make_parser(name, *, starts_inside=False):
    return select_parser("", reasoning_override=name, starts_in_reasoning=starts_inside)


def parse(name, text, **options):
    reply = parse_all(make_parser(name, **options), text)
    return reply.reasoning, reply.content


def markers_of(name):
    entry = next(one for one in REASONING_FORMATS if one.name == name)
    return entry.starts[0], entry.ends[0]


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_and_answer_are_told_apart(name):
    """The markers and the white space next to them are in neither; an empty block is nothing."""
    start, end = markers_of(name)

    assert parse(name, f"{start}\nWhy?\nSo.\n{end}\n\nYes, indeed.") == ("Why?\nSo.", "Yes, indeed.")
    assert parse(name, f"\n{start}a{end}b") == ("a", "b")
    assert parse(name, f"{start}\n\n{end}\n\nb") == ("", "b")
    assert parse(name, "just an answer ") == ("", "just an answer ")
    assert parse(name, "") == ("", "")


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_that_the_prompt_has_opened(name):
    """A reply that starts inside needs no start marker, and may repeat it."""
    start, end = markers_of(name)

    assert parse(name, f"\nWhy?{end}Yes", starts_inside=True) == ("Why?", "Yes")
    assert parse(name, f"{start}Why?{end}Yes", starts_inside=True) == ("Why?", "Yes")
    assert parse(name, "Why? I", starts_inside=True) == ("Why? I", "")


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_that_never_ends_is_delivered(name):
    """Cut off at the limit, also within its end marker, all text is reasoning."""
    start, end = markers_of(name)
    for length in range(len(end)):
        assert parse(name, f"{start}a \n{end[:length]}") == (f"a \n{end[:length]}", "")


@pytest.mark.parametrize("name", [entry.name for entry in REASONING_FORMATS if not entry.is_anywhere])
def test_an_answer_may_speak_of_the_markers(name):
    """After the answer has begun, a start marker is text, and so is an end marker without a start."""
    start, end = markers_of(name)
    text = f"Write {start} and {end} around it."

    assert parse(name, text) == ("", text)
    assert parse(name, f"{start}a{end}{text}") == ("a", text)


@pytest.mark.parametrize("name", [entry.name for entry in REASONING_FORMATS if entry.is_anywhere])
def test_markers_that_are_tokens_count_anywhere(name):
    """More than one block, also after content."""
    start, end = markers_of(name)

    assert parse(name, f"{start}a{end}b {start}c{end} d") == ("ac", "b d")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), starts_inside=st.booleans())
def test_chunking_never_matters_and_nothing_is_lost(name, data, starts_inside):
    """Soup of markers, their beginnings and text gives the same in one piece, in characters and cut anywhere."""
    start, end = markers_of(name)
    pieces = st.sampled_from([start, end, start[:-1], end[:-1], " ", "\n\n", "<"]) | st.text(max_size=3)
    text = data.draw(st.lists(pieces, max_size=12).map("".join))
    places = [0, *sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6))), len(text)]

    def run(cuts):
        parser = make_parser(name, starts_inside=starts_inside)
        return collect([*itertools.chain.from_iterable(map(parser.push, cuts)), *parser.flush()])

    whole = run([text])

    assert run(list(text)) == whole
    assert run([text[a:b] for a, b in itertools.pairwise(places)]) == whole
    entry = next(one for one in REASONING_FORMATS if one.name == name)
    left = whole.reasoning + whole.content
    for marker in (*entry.starts, *entry.ends):
        text, left = text.replace(marker, ""), left.replace(marker, "")
    assert sorted("".join(left.split())) == sorted("".join(text.split()))


def test_answers_stream_without_delay():
    """Once the answer has begun, each delta is given out as it comes."""
    parser = make_parser("think")
    parser.push("<think>a</think>")

    assert [parser.push(text) for text in ("So", " it <", "think> is\n")] == [
        [ContentDelta("So")],
        [ContentDelta(" it <")],
        [ContentDelta("think> is\n")],
    ]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ content.split('</think>')[-1] }}", "think"),
        ("<|channel>thought\n<channel|>", "gemma4"),
        ("<|START_THINKING|>", "command"),
        ("[THINK]", "mistral"),
        ("◁think▷", "kimi"),
        ("Write your thoughts after 'Here is my thought process:'", "granite"),
        ("{{ messages }}", None),
        ("", None),
    ],
)
def test_the_template_tells_the_format(source, expected):
    """Markers in the template's source, the more particular first."""
    found = find_reasoning_format(source)

    assert (found.name if found else None) == expected


def test_overrides():
    """A name wins over the template, `none` leaves all in the content, others are refused with the known ones."""
    text = "<think>a</think>b"

    assert parse_all(select_parser("<think>", reasoning_override="none"), text).content == text
    assert parse_all(select_parser("[THINK]", reasoning_override="think"), text).reasoning == "a"
    with pytest.raises(ValueError, match="reasoning format 'thinking' is unknown: use none or one of gemma4, command"):
        select_parser("", reasoning_override="thinking")


def test_a_prompt_that_opened_reasoning_needs_no_template():
    """What the codec found in the rendered prompt is enough."""
    reply = parse_all(select_parser("", starts_in_reasoning=True), "a</think>b")

    assert (reply.reasoning, reply.content) == ("a", "b")
