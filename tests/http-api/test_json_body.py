"""Strict JSON bodies."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_http_api import InvalidRequest
from headrace_http_api.json_body import MAX_DEPTH, field_path, parse_object

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(value=st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=5), ascii_only=st.booleans())
def test_valid_json_is_read_as_the_standard_library_reads_it(value, ascii_only):
    """Whatever is valid JSON and holds nothing refused is parsed to the same value."""
    assert parse_object(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@settings(max_examples=100, deadline=None)
@given(body=st.binary(max_size=60))
def test_any_bytes_are_an_object_or_refused(body):
    """No body makes the parser fail in any other way than by refusing it."""
    try:
        value = parse_object(body)
    except InvalidRequest:
        value = {}

    assert isinstance(value, dict)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"a": NaN}', "a"),
        (b'{"a": [1, {"b": -Infinity}]}', "a[1].b"),
        (b'{"a": 1e400}', "a"),
        (b'{"a": {"b": 1, "b": 1}}', "a.b"),
        (b'{"a": 1, "a": 2}', "a"),
        (b'{"m": [{"c": "x\\ud800"}]}', "m[0].c"),
        (b'{"a\\udc00": 1}', '["a\\udc00"]'),
        (b'{"a": ' + b"9" * 5000 + b"}", "a"),
    ],
)
def test_refused_values_are_named_by_their_path(body, param):
    """A value that only a lenient parser reads is refused with its path."""
    with pytest.raises(InvalidRequest) as caught:
        parse_object(body)

    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nope",
        b'{"a": 1} x',
        b"[]",
        b'"text"',
        b"5",
        b"null",
        b'{"a": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"\x00{}",
        b"[" * 10_000,
        b'{"a":' * 10_000,
        b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    ],
)
def test_bodies_that_are_no_json_object_are_refused(body):
    """Malformed JSON, wrong encodings, other values than objects and deep nesting say what they are."""
    with pytest.raises(InvalidRequest) as caught:
        parse_object(body)

    assert caught.value.code == "invalid_json"


def test_depth_counts_brackets_outside_strings_only():
    """Exactly the allowed depth is read, one more is not, and brackets in texts and side by side do not count."""
    inner = MAX_DEPTH - 1
    assert parse_object(b'{"a":' + b"[" * inner + b"]" * inner + b"}")
    assert parse_object(json.dumps({"a": '[{"' * 500, "b": [[]] * 500}).encode())
    with pytest.raises(InvalidRequest):
        parse_object(b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}")


def test_containers_are_limited():
    """Millions of small objects are refused before Python makes any of them."""
    assert parse_object(b'{"a":[' + b"{}," * 1_000 + b"{}]}")
    with pytest.raises(InvalidRequest, match="more than 100000 arrays and objects"):
        parse_object(b'{"a":[' + b"{}," * 100_000 + b"{}]}")


def test_unterminated_strings_are_scanned_once():
    """A body of escaped quotes without an end costs time in proportion to its length, not to its square."""
    body = b'{"a": ' + b"[" * MAX_DEPTH + b'"' + b'\\"' * 2_000_000
    with pytest.raises(InvalidRequest):
        parse_object(body)


def test_surrogate_pairs_are_characters():
    """A pair of escapes is one character and passes, also beside an escaped backslash."""
    assert parse_object(b'{"a": "\\ud83d\\ude00", "b": "\\\\ud800"}') == {"a": "\U0001f600", "b": "\\ud800"}


def test_paths_quote_what_is_no_plain_name():
    """Plain names join with dots, indexes and other keys go in brackets."""
    assert field_path(field_path(field_path("", "messages"), 0), "content") == "messages[0].content"
    assert field_path("logit_bias", "5") == 'logit_bias["5"]'
