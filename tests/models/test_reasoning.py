"""One resolver decides whether a model thinks, in its own template's words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_models.reasoning import reasoning_kwargs

SWITCH = "{% if enable_thinking %}"
OTHER_SWITCH = "{% if thinking %}"
EFFORTS = "{% if reasoning_effort in ['low', 'medium', 'high'] %}"


def resolve(source, effort=None, **variables):
    return reasoning_kwargs(source, reasoning_effort=effort, template_kwargs=variables)


@given(given=st.booleans(), effort=st.sampled_from([None, "none", "low", "high"]))
def test_the_switch_wins_over_the_effort(given, effort):
    """A boolean enable_thinking is kept, whatever the effort."""
    assert resolve(SWITCH, effort, enable_thinking=given)["enable_thinking"] is given


@pytest.mark.parametrize(("effort", "expected"), [("none", False), ("minimal", True), ("high", True)])
@pytest.mark.parametrize(("source", "name"), [(SWITCH, "enable_thinking"), (OTHER_SWITCH, "thinking")])
def test_an_effort_sets_the_switch_under_the_templates_name(source, name, effort, expected):
    """No effort is no thinking, any other is thinking; the template is told under the name that it reads."""
    assert resolve(source, effort)[name] is expected


def test_the_switch_is_translated_to_the_templates_name():
    """enable_thinking reaches a template that calls it thinking."""
    assert resolve(OTHER_SWITCH, enable_thinking=False) == {"enable_thinking": False, "thinking": False}


def test_nothing_asked_for_is_nothing_set():
    """Without a switch and an effort the template's default holds."""
    assert resolve(SWITCH, other=1) == {"other": 1}


@pytest.mark.parametrize(
    ("effort", "expected"), [("none", "low"), ("minimal", "low"), ("xhigh", "high"), ("medium", "medium"), ("42", "42")]
)
def test_an_effort_becomes_the_nearest_that_the_template_knows(effort, expected):
    """Efforts between or beyond the template's own become the nearest; unknown words pass unchanged."""
    assert resolve(EFFORTS, effort)["reasoning_effort"] == expected
    assert resolve("", effort)["reasoning_effort"] == effort
    assert resolve(EFFORTS, effort, reasoning_effort="mine")["reasoning_effort"] == "mine"
