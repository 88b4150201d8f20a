"""Templates: messages are normalised, the sandbox holds, and what a template refuses is a TemplateError."""

import json
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_models.errors import TemplateError
from headrace_models.messages import normalize_messages
from headrace_models.template import ChatTemplate

SIMPLE = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def render(source, conversation=(), **variables):
    return ChatTemplate({"default": source}).render(conversation, template_kwargs=variables)


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(st.text(max_size=8), max_size=4), role=st.sampled_from(["developer", "system", "user"]))
def test_text_parts_render_as_their_joined_text(parts, role):
    """An array of text parts renders as one string of the same text, and developer renders as system."""
    array = [{"role": role, "content": [{"type": "text", "text": part} for part in parts]}]
    plain = [{"role": "system" if role == "developer" else role, "content": "".join(parts)}]
    assert render(SIMPLE, array) == render(SIMPLE, plain)


def test_normalising_changes_no_message_of_the_caller_and_keeps_media():
    """The caller's messages stay as they are; arrays with media reach the template unchanged."""
    media = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "developer", "content": media}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    before = json.dumps(messages)
    first, second = normalize_messages(messages)
    assert json.dumps(messages) == before
    assert (first["role"], first["content"]) == ("system", media)
    assert (second["content"], second["tool_calls"][0]["function"]["arguments"]) == ("", {"x": 1})


def test_arguments_that_are_no_json_stay_text():
    """A tool call's argument string that is no JSON reaches the template as it is."""
    call = {"function": {"name": "f", "arguments": "x = 1"}}
    assert normalize_messages([{"role": "assistant", "tool_calls": [call]}])[0]["tool_calls"] == [call]


def test_a_template_sees_special_tokens_helpers_and_variables():
    """Special tokens, tojson without HTML escapes, the date, loop controls and request variables all work."""
    source = "{{ bos_token }}{{ x | tojson }}{% for i in [1, 2] %}{% break %}{% endfor %}{{ strftime_now('%Y') }}"
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"})
    rendered = template.render([], template_kwargs={"x": {"ü": "<&'>"}})
    year = datetime.now().astimezone().year
    assert rendered in {f'<s>{{"ü": "<&\'>"}}{year + shift}' for shift in (-1, 0)}


def test_generation_blocks_render_what_is_inside():
    """The markers that training templates put around replies leave no trace."""
    assert render("a{% generation %}b{% if x %}c{% endif %}{% endgeneration %}d", x=True) == "abcd"


def test_tools_choose_the_template_made_for_them():
    """With tools the template named tool_use renders, without them the default does."""
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert template.render([]) == "plain"
    assert template.render([], template_kwargs={"tools": [{}]}) == "tools"
    assert ChatTemplate({"default": "plain"}).render([], template_kwargs={"tools": [{}]}) == "plain"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages[0].content + 1 }}", "UndefinedError"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ 'a' + 1 }}", "TypeError"),
    ],
)
def test_whatever_goes_wrong_in_a_template_is_a_template_error(source, words):
    """Refusals, sandbox breaks, undefined values, bad syntax and plain exceptions are one error with the reason."""
    with pytest.raises(TemplateError, match=words):
        render(source)


def test_content_is_data_and_never_template():
    """Jinja in a message is printed, not run."""
    assert render(SIMPLE, [{"role": "user", "content": "{{ 1 + 1 }}"}]) == "[user:{{ 1 + 1 }}]>"


def test_messages_are_no_template_variable():
    """A request cannot smuggle another conversation in as a template variable."""
    with pytest.raises(TemplateError, match="'messages'"):
        render(SIMPLE, messages=[])
