"""Strict structuring with the path of the fault."""

from typing import Annotated

import pytest
from attrs import field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_http_api import InvalidRequest
from headrace_http_api.validation import AtLeast, Between, make_converter, structure, unknown_names


@frozen(kw_only=True)
class Part:
    size: Annotated[int, AtLeast(1)]
    name: str = ""


@frozen(kw_only=True)
class Whole:
    parts: tuple[Part, ...]
    share: Annotated[float, Between(0, 1)] | None = None
    on: bool = False
    tags: list[str] = field(factory=list)


CONVERTER = make_converter()
GOOD = {"parts": [{"size": 1}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "parts"),
        ({"parts": None}, "parts"),
        ({"parts": [{"size": 1}, {"size": 0}]}, "parts[1].size"),
        ({"parts": [{}]}, "parts[0].size"),
        ({"parts": [{"size": None}]}, "parts[0].size"),
        ({"parts": [5]}, "parts[0]"),
        ({"parts": {"size": 1}}, "parts"),
        ({"parts": "ab"}, "parts"),
        ({"parts": [{"size": True}]}, "parts[0].size"),
        ({"parts": [{"size": "1"}]}, "parts[0].size"),
        ({"parts": [{"size": 1, "name": 5}]}, "parts[0].name"),
        (GOOD | {"share": 1.5}, "share"),
        (GOOD | {"share": float("nan")}, "share"),
        (GOOD | {"on": 1}, "on"),
        (GOOD | {"tags": ["a", 5]}, "tags[1]"),
    ],
)
def test_fault_is_named_by_its_path(body, param):
    """The first wrong value is refused with the path from the body's root."""
    with pytest.raises(InvalidRequest) as caught:
        structure(CONVERTER, body, Whole)

    assert caught.value.param == param
    assert caught.value.message.startswith(param)


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1) | st.integers(0, 1) | st.none(), on=st.booleans(), tags=st.lists(st.text()))
def test_valid_values_are_kept_as_they_are(share, on, tags):
    """What is valid is stored unchanged; null is the default; an integer may stand for a float."""
    whole = structure(CONVERTER, GOOD | {"share": share, "on": on, "tags": tags}, Whole)

    assert (whole.share, whole.on, whole.tags) == (share, on, tags)
    assert whole.share is None or type(whole.share) is float


def test_unknown_names_are_those_nobody_declares():
    """Fields, accepted names and nulls are known; the rest keeps the body's order."""
    body = GOOD | {"z": 1, "user": 2, "a": 3, "null": None}

    assert unknown_names(body, Whole, frozenset({"user"})) == ("z", "a")
