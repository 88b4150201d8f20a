"""`headrace fit`, and the refusal before anything is loaded."""

import json
import logging
import pickle
from pathlib import Path

import pytest

from headrace_chat_server.cli import main
from headrace_chat_server.composition import make_port
from headrace_chat_server.errors import ModelUnavailable
from headrace_chat_server.fit import ServingLimits, check_fit
from headrace_chat_server.settings import EngineSettings, SamplingSettings
from headrace_chat_server.text_side import load_text_side
from headrace_models import ModelSource, SourceError, TemplateError, fit_source
from headrace_models.usable_memory import UsableMemory


@pytest.fixture
def source(tiny_llama):
    return ModelSource(name="tiny", path=tiny_llama, format="folder")


@pytest.fixture
def with_memory(monkeypatch):
    """Let the machine have so many bytes."""

    def limit(size_bytes):
        found = UsableMemory(size_bytes=size_bytes, origin="a test's limit", advice="ask the test")
        monkeypatch.setattr("headrace_models.usable_memory.usable_memory", lambda _: found)

    return limit


def test_the_command_prints_every_sum(tiny_llama, with_memory, capsys):
    """People read names and a verdict; the exit code is 0 because it fits."""
    with_memory(1 << 33)
    assert main(["fit", str(tiny_llama), "--ctx", "1000", "--rows", "3"]) == 0
    text = capsys.readouterr().out
    assert all(part in text for part in ("weights", "keys and values", "one step", "usable", "3 x 1000", "Fits:"))


def test_json_has_the_report_and_the_exit_code_is_the_verdict(tiny_llama, with_memory, capsys):
    """Programs read bytes; what does not fit exits with 1 and says what to change."""
    with_memory(1 << 28)
    assert main(["fit", str(tiny_llama), "--rows", "100000", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    parts = ("weights_bytes", "kv_bytes", "transient_bytes", "runtime_bytes", "prefix_bytes")
    assert found["total_bytes"] == sum(found[part] for part in parts)
    assert (found["fits"], found["usable_bytes"], found["num_tokens"]) == (False, 1 << 28, 2048)
    assert any("run at most" in line for line in found["advice"])
    assert found["advice"][-1] == "ask the test"


@pytest.mark.parametrize("words", [["--ctx", "0"], ["--rows", "-1"], ["--kv", "7"], ["--rows", "x"], ["a", "b"]])
def test_wrong_words_are_usage_errors(words):
    """Counts and schemes are checked before any model is looked for."""
    with pytest.raises(SystemExit) as ended:
        main(["fit", *words])
    assert ended.value.code == 2


def test_a_scheme_that_the_model_cannot_take_is_one_line(tiny_llama, capsys):
    """Heads of 8 have no groups of 64."""
    assert main(["fit", str(tiny_llama), "--kv", "8"]) == 2
    assert "group" in capsys.readouterr().err


def test_serving_is_refused_before_anything_is_loaded(tiny_llama, with_memory, monkeypatch, capsys):
    """The whole command: one line, exit code 2, and nobody composed a server."""
    with_memory(1000)
    monkeypatch.setattr("headrace_chat_server.serve.compose", lambda *_, **__: pytest.fail("it was composed"))
    assert main(["serve", str(tiny_llama), "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert "does not fit" in error
    assert "--ignore-fit" in error


def test_ignore_fit_is_logged(source, with_memory, caplog):
    """The operator may know better, and the log says what was ignored; memory then sets no limits."""
    with_memory(1000)
    with caplog.at_level(logging.WARNING):
        assert check_fit(EngineSettings(ignore_fit=True), source) is None
    assert "does not fit" in caplog.text


@pytest.mark.parametrize("prompt_cache", [0, 1 << 40])
def test_limits_leave_room_for_weights_and_a_step(source, with_memory, prompt_cache):
    """The longest row and all slots fit beside the rest; stored prompts never squeeze them out."""
    plan = fit_source(source, num_tokens=1).plan
    with_memory(plan.total_bytes(1000, 1))
    limits = check_fit(EngineSettings(prompt_cache=prompt_cache), source)
    assert 256 <= limits.max_context < plan.max_positions
    assert plan.row_kv_bytes(limits.max_context) <= limits.kv_budget_bytes <= plan.total_bytes(1000, 1)
    if not prompt_cache:
        assert limits.max_context >= 1000


def test_the_operator_s_budget_only_lowers_the_machine_s(source, with_memory):
    """--kv-budget holds where it is tighter."""
    with_memory(1 << 30)
    assert check_fit(EngineSettings(kv_budget=123_456), source).kv_budget_bytes == 123_456
    assert check_fit(EngineSettings(kv_budget=1 << 40), source).kv_budget_bytes < 1 << 30


def test_limits_reach_the_engine():
    """What was decided is what the engine's configuration says."""
    settings = EngineSettings(transport="thread", kv_budget=5)
    limits = ServingLimits(max_context=77, kv_budget_bytes=99, prompt_cache_bytes=3, slot_bytes=len)
    config = make_port(settings, lambda: None, Path("m"), limits)._config
    assert (config.max_context, config.kv_budget_bytes, config.prompt_cache_bytes, config.slot_bytes) == (
        77,
        99,
        3,
        len,
    )
    config = make_port(settings, lambda: None)._config
    assert (config.max_context, config.kv_budget_bytes, config.slot_bytes) == (None, 5, None)


def test_what_a_slot_takes_is_known_to_a_child_process(source, with_memory):
    """Limits cross to the engine's process, and tell what the plan tells."""
    with_memory(1 << 30)
    limits = check_fit(EngineSettings(), source)
    again = pickle.loads(pickle.dumps(limits))
    assert again.slot_bytes(1024) == limits.slot_bytes(1024) > 0


def test_a_chat_template_replaces_the_model_s(source, tmp_path):
    """Its text is what conversations are rendered with."""
    file = tmp_path / "t.jinja"
    file.write_text("<<{{ messages[0]['content'] }}>>")
    codec = load_text_side(source, SamplingSettings(), str(file)).codec
    assert codec.decode(codec.prepare_chat([{"role": "user", "content": "hey"}]).ids) == "<<hey>>"


@pytest.mark.parametrize(("text", "error"), [("{% if %}", TemplateError), (None, ModelUnavailable)])
def test_a_broken_or_missing_template_ends_the_start(source, tmp_path, text, error):
    """Not the first request: the template is read and tried as the server starts."""
    file = tmp_path / "t.jinja"
    if text is not None:
        file.write_text(text)
    with pytest.raises(error):
        load_text_side(source, SamplingSettings(), str(file))


def test_a_missing_folder_is_the_model_s_error(tmp_path):
    """Reading headers of nothing is a ModelError."""
    with pytest.raises(SourceError):
        fit_source(ModelSource(name="x", path=tmp_path, format="folder"))
