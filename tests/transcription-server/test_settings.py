"""Laws of the transcription server's settings and of its command line."""

import json
import subprocess
import sys

import pytest
from attrs import asdict
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_transcription_server.cli import main, render
from headrace_transcription_server.errors import InvalidSetting
from headrace_transcription_server.settings import (
    TranscriptionSettings,
    flag_of,
    options,
    read_settings,
    variable_of,
)

TREES = st.builds(
    TranscriptionSettings,
    model=st.text("abcä/ .-", min_size=1),
    host=st.text("abc.:0", min_size=1),
    port=st.integers(0, 65535),
    idle_unload_s=st.floats(0, 86_400),
)


@given(TREES)
@settings(max_examples=30, deadline=None)
def test_flags_environment_and_file_read_back_the_same_tree(tmp_path_factory, tree):
    """Any tree survives a round trip through each of the three sources."""
    texts = {name: str(value) for name, value in asdict(tree).items()}
    assert read_settings(texts, environ={}) == tree
    assert read_settings({}, environ={variable_of(name): text for name, text in texts.items()}) == tree
    path = tmp_path_factory.mktemp("settings") / "transcribe.toml"
    path.write_text(render(tree), encoding="utf-8")
    assert read_settings({}, environ={}, config=str(path)) == tree
    assert read_settings({}, environ={variable_of("config"): str(path)}) == tree


def test_flag_wins_over_environment_over_file_over_default(tmp_path):
    """The precedence is flag, environment, file, default."""
    path = tmp_path / "transcribe.toml"
    path.write_text("port = 1")
    environ = {variable_of("port"): "2"}
    assert read_settings({}, environ={}).port == 8090
    assert read_settings({}, environ={}, config=str(path)).port == 1
    assert read_settings({}, environ=environ, config=str(path)).port == 2
    assert read_settings({"port": "3"}, environ=environ, config=str(path)).port == 3


@pytest.mark.parametrize("name", ["port", "idle_unload_s", "host"])
def test_a_wrong_value_names_its_source_the_field_and_the_range(tmp_path, name):
    """An error says which source held the value, which field it is, what is allowed and what to do."""
    path = tmp_path / "transcribe.toml"
    bad = "" if name == "host" else "-7x"
    path.write_text(f"{name} = {json.dumps(bad)}")
    sources = [
        ({name: bad}, {}, None, f"flag {flag_of(name)}"),
        ({}, {variable_of(name): bad}, None, f"environment variable {variable_of(name)}"),
        ({}, {}, str(path), f"configuration file {path}"),
    ]
    for flags, environ, config, origin in sources:
        with pytest.raises(InvalidSetting) as caught:
            read_settings(flags, environ=environ, config=config)
        assert caught.value.origin == origin
        message = str(caught.value)
        assert all(part in message for part in (origin, name, repr(bad), options()[name].allowed, "default"))


@pytest.mark.parametrize("text", [None, "port = =", "prot = 1"])
def test_a_file_with_a_problem_is_a_plain_error(tmp_path, text):
    """A missing or malformed file and an unknown key are InvalidSetting."""
    path = tmp_path / "transcribe.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidSetting, match="configuration file"):
        read_settings({}, environ={}, config=str(path))


def test_print_config_writes_a_file_that_reads_back(capsys, tmp_path):
    """What --print-config prints is a valid configuration file for the same settings."""
    assert main(["--port", "7", "--print-config"]) == 0
    path = tmp_path / "transcribe.toml"
    path.write_text(capsys.readouterr().out)
    assert read_settings({}, environ={}, config=str(path)) == TranscriptionSettings(port=7)


def test_starting_says_in_one_line_that_transcription_comes_later():
    """The program as installed refuses plainly, with exit code 2 and no traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace_transcription_server"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "transcription is not part of version" in line
    assert done.stdout == ""


@pytest.mark.parametrize("words", [["--prot", "1"], ["--port", "x"]])
def test_a_wrong_flag_is_exit_code_2(words, capsys):
    """Unknown flags and wrong values are usage errors."""
    try:
        code = main(words)
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    assert words[0] in capsys.readouterr().err
