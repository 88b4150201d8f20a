"""`headrace batch`: files in and out, on a small deterministic model."""

import json
from functools import partial
from pathlib import Path

import pytest

from headrace_chat_server import batch
from headrace_chat_server.batch import answered_ids, read_lines, run_batch
from headrace_chat_server.composition import compose
from headrace_chat_server.errors import BatchFileError
from headrace_chat_server.settings import build
from headrace_chat_server.text_side import TextSide
from headrace_http_api import SamplingDefaults
from headrace_models import ModelSource
from headrace_scheduling.testing import FakeCodec, ModelLoaderFake, ScriptedModel

SOURCE = ModelSource(name="toy", path=Path("/no/such/folder"), format="folder")
SETTINGS = build({"engine.transport": "thread", "engine.max_tokens": 6, "server.api_keys": ("secret",)})


def load_toy_text() -> TextSide:
    return TextSide(codec=FakeCodec(), sampling_defaults=SamplingDefaults(temperature=0.0))


@pytest.fixture
def toy(monkeypatch):
    """The command on a toy model in place of a real one."""
    made = partial(compose, loader=ModelLoaderFake(ScriptedModel), load_text=load_toy_text)
    monkeypatch.setattr(batch, "compose", made)
    monkeypatch.setattr(batch, "find_model", lambda name: SOURCE)


def write(path: Path, *lines: object) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


def answers(path: Path) -> dict[str, dict]:
    return {answer["custom_id"]: answer for answer in map(json.loads, path.read_text().splitlines())}


def test_every_line_has_one_answer(tmp_path, toy, capsys):
    """Requests are answered whatever their neighbours are; wrong ones say why, and the exit code tells of them."""
    source = write(
        tmp_path / "in.jsonl",
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hello"}},
        {"prompt": "bare", "max_tokens": 3},
        "",
        "{broken",
        "[1, 2]",
        {"custom_id": "b", "body": 3},
        {"custom_id": "c", "url": "/v1/elsewhere", "body": {}},
        {"custom_id": "d", "prompt": "x", "stream": True},
        {"custom_id": "e", "prompt": "x", "temperature": "hot"},
    )
    target = tmp_path / "out.jsonl"
    assert run_batch(SETTINGS, source, str(target)) == 1
    found = answers(target)
    assert set(found) == {"a", "line-2", "line-4", "line-5", "b", "c", "d", "e"}
    assert found["a"]["response"]["status_code"] == 200
    assert found["a"]["response"]["body"]["usage"]["completion_tokens"] <= 6
    assert found["line-2"]["response"]["body"]["usage"]["completion_tokens"] <= 3
    for name, word in (("line-4", "JSON"), ("line-5", "object"), ("b", "body"), ("c", "url"), ("d", "stream")):
        assert word in found[name]["error"]["message"]
    assert found["e"]["response"]["status_code"] == 400
    assert found["e"]["error"]["param"] == "temperature"
    assert "2 answered, 6 failed" in capsys.readouterr().out


def test_a_second_run_answers_only_what_is_left(tmp_path, toy, capsys):
    """Answers that are there stay; failures and what a kill cut off are tried again."""
    lines = [{"custom_id": f"r{n}", "prompt": f"text {n}"} for n in range(5)]
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    assert run_batch(SETTINGS, source, str(target)) == 0
    whole = target.read_text().splitlines()
    target.write_text("\n".join(whole[:3]) + "\n" + json.dumps({"custom_id": "r9", "error": {"code": "x"}}) + "\n")
    assert len(answered_ids(target)) == 3
    assert run_batch(SETTINGS, source, str(target)) == 0
    assert "2 answered, 0 failed, 3 answered before" in capsys.readouterr().out
    assert {name for name, answer in answers(target).items() if answer["error"] is None} == {f"r{n}" for n in range(5)}


def test_an_unfinished_line_counts_for_nothing(tmp_path):
    """A run that was killed while writing leaves half a line, which answers nothing."""
    target = tmp_path / "out.jsonl"
    target.write_text('{"custom_id": "a", "error": null}\n{"custom_id": "b", "err')
    assert answered_ids(target) == {"a"}
    assert answered_ids(tmp_path / "none") == frozenset()


def test_an_unfinished_line_is_closed_before_the_next_answer(tmp_path, toy):
    """What is appended after half a line is a line of its own."""
    source, target = write(tmp_path / "in.jsonl", {"custom_id": "b", "prompt": "x"}), tmp_path / "out.jsonl"
    target.write_text('{"custom_id": "a", "error": null}\n{"custom_id": "b", "err')
    assert run_batch(SETTINGS, source, str(target)) == 0
    assert answered_ids(target) == {"a", "b"}


def test_files_that_cannot_be_used_end_the_command(tmp_path, toy):
    """Missing and doubled input, and an output that cannot be written, are told before anything runs."""
    with pytest.raises(BatchFileError, match="cannot be read"):
        run_batch(SETTINGS, str(tmp_path / "none"), str(tmp_path / "out"))
    twice = write(tmp_path / "twice", {"custom_id": "a", "prompt": "x"}, {"custom_id": "a", "prompt": "y"})
    with pytest.raises(BatchFileError, match="lines 1 and 2"):
        read_lines(Path(twice))
    once = write(tmp_path / "once", {"prompt": "x"})
    with pytest.raises(BatchFileError, match="cannot be written"):
        run_batch(SETTINGS, once, str(tmp_path / "no" / "folder"))
