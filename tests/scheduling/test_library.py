"""Laws of `Engine`, the synchronous front."""

import pytest

from headrace_scheduling import (
    ContextOverBudget,
    Engine,
    EngineFailed,
    EngineUnavailable,
    GenerateOptions,
    RequestRefused,
)
from headrace_scheduling.testing import FakeLoader, FakeRunnerFactory, fake_config


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_texts_and_ids_are_generated_in_the_order_given(transport):
    """Law: results come in the order of the prompts, more of them than rows, on both transports."""
    with Engine.open_config(fake_config(max_rows=2), transport=transport) as engine:
        prompts = ["abc", (120, 121), "é", "q", [49, 50, 51]]
        results = engine.generate(prompts, GenerateOptions(max_tokens=4))
        assert [result.text for result in results] == ["abca", "xyxy", "éé", "qqqq", "1231"]
        assert results[0].token_ids == tuple(b"abca")
        assert results[0].finished.reason == "length"
        assert engine.info.max_rows == 2
        assert engine.generate([]) == []


def test_without_a_limit_the_context_ends_a_row():
    """Law: no max_tokens means up to the context's remainder."""
    with Engine.open_config(fake_config(loader=FakeLoader(max_positions=20))) as engine:
        (result,) = engine.generate(["abc"])
        assert len(result.token_ids) == 17
        assert result.finished.reason == "length"


def test_a_prompt_that_does_not_fit_is_refused_before_anything_runs():
    """Law: refusals come before the first submission."""
    with Engine.open_config(fake_config(loader=FakeLoader(max_positions=4))) as engine:
        with pytest.raises(ContextOverBudget, match="4 tokens"):
            engine.generate(["a", "abcd"])
        with pytest.raises(RequestRefused, match="at least 1"):
            engine.generate([""])
        assert engine.status.num_submitted == 0


def test_failures_are_raised_and_the_engine_goes_on():
    """Law: a failed step raises EngineFailed, the rest is cancelled, later calls work."""
    config = fake_config(max_rows=1, runner=FakeRunnerFactory(failing_dispatches=frozenset({1})))
    with Engine.open_config(config) as engine:
        with pytest.raises(EngineFailed, match="ArithmeticError"):
            engine.generate(["abc", "abd"])
        assert engine.generate(["ab"], GenerateOptions(max_tokens=2))[0].text == "ab"


def test_a_model_that_cannot_be_loaded_is_an_error_of_open():
    """Law: `open` raises what the loader said."""
    with pytest.raises(EngineUnavailable, match="no weights here"):
        Engine.open(FakeLoader(error="no weights here"))


def test_a_closed_engine_refuses():
    """Law: after close nothing is generated."""
    engine = Engine.open_config(fake_config())
    engine.close()
    with pytest.raises(EngineUnavailable, match="stopped"):
        engine.generate(["a"])


def test_an_unknown_transport_is_refused():
    """Law: the transport is one of two."""
    with pytest.raises(ValueError, match="'thread' or 'process'"):
        Engine.open(FakeLoader(), transport="fiber")
