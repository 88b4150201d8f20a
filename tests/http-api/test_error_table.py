"""One table from exceptions to status and body."""

import json
import logging

import pytest

import headrace_http_api.errors
import headrace_sampling.errors
import headrace_scheduling.errors
from headrace_http_api import ApiError, InvalidRequest
from headrace_http_api.error_table import ERROR_RULES, INTERNAL, reply_to, rule_of
from headrace_sampling.errors import InvalidSamplingParams, SamplingError
from headrace_scheduling.errors import (
    ContextOverBudget,
    EngineFailed,
    EngineGone,
    EngineUnavailable,
    GatewayClosed,
    QueueFull,
    SchedulingError,
)


def tree(base):
    yield base
    for child in base.__subclasses__():
        yield from tree(child)


def own_tree(base, root):
    return [cls for cls in tree(base) if cls.__module__.startswith(root + ".")]


EVERY = [
    *own_tree(ApiError, "headrace_http_api"),
    *own_tree(SchedulingError, "headrace_scheduling"),
    *own_tree(SamplingError, "headrace_sampling"),
]


def test_table_is_complete_and_names_nothing_else():
    """Every error of the three trees has a rule of its own, and no rule is for a class that does not exist.

    Rules for `headrace_models` are held to it where both packages may be seen, in tests/integration.
    """
    own_rules = {name for name in ERROR_RULES if not name.startswith("headrace_models.")}
    assert {f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in EVERY} == own_rules


@pytest.mark.parametrize("module", [headrace_http_api.errors, headrace_scheduling.errors, headrace_sampling.errors])
def test_tree_at_the_top_of_the_module_is_the_real_one(module):
    """The drawn tree names each class of the module."""
    for cls in EVERY:
        if cls.__module__ == module.__name__:
            assert cls.__name__ in module.__doc__


@pytest.mark.parametrize(
    ("exc", "status", "code"),
    [
        (QueueFull("full"), 429, "queue_full"),
        (GatewayClosed("draining"), 503, "server_draining"),
        (EngineUnavailable("loading"), 503, "engine_unavailable"),
        (EngineGone("failed"), 503, "engine_unavailable"),
        (EngineFailed("died"), 500, "engine_failed"),
        (ContextOverBudget(9, 8), 400, "context_length_exceeded"),
        (InvalidSamplingParams("top_p", 2, "a number from 0 to 1"), 400, "invalid_value"),
        (InvalidRequest("stop is 5", param="stop"), 400, "invalid_value"),
        (RuntimeError("secret"), 500, "internal_error"),
    ],
)
def test_status_code_and_retry(exc, status, code):
    """Overload and unavailability that may pass ask to retry; nothing else does; every body is OpenAI's envelope."""
    reply = reply_to(exc, "r1")

    assert (reply.status, reply.body["error"]["code"]) == (status, code)
    assert set(reply.body["error"]) == {"message", "type", "param", "code"}
    assert ("retry-after" in reply.headers) == (status in (429, 503) and type(exc) is not EngineGone)


def test_sampling_errors_name_their_field():
    """A parameter that only the sampler refuses is named like one refused at the border."""
    assert reply_to(InvalidSamplingParams("top_p", 2, "less"), "r1").body["error"]["param"] == "top_p"


def test_subclass_without_a_rule_takes_its_base_rule():
    """An application's own subclass is told as its base is."""

    class Mine(QueueFull):
        pass

    assert rule_of(Mine(1)).status == 429
    assert rule_of(ZeroDivisionError()) is INTERNAL


def test_unexpected_error_is_logged_once_without_its_words(caplog):
    """The log tells id, type and place; neither it nor the client sees the message, which may quote a prompt."""
    prompt = "my secret prompt"
    with pytest.raises(KeyError) as caught:
        {}[prompt]
    with caplog.at_level(logging.DEBUG):
        reply = reply_to(caught.value, "req-7")

    assert len(caplog.records) == 1
    assert "req-7" in caplog.text
    assert "KeyError" in caplog.text
    assert "test_error_table.py" in caplog.text
    assert prompt not in caplog.text
    assert "req-7" in reply.body["error"]["message"]
    assert "secret" not in json.dumps(reply.body)
