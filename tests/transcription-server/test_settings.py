"""Laws of the transcription server's settings and of its command line."""

import json

import pytest
from attrs import asdict
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_transcription_server.cli import main, render
from headrace_transcription_server.errors import InvalidSetting, UnsafeBinding
from headrace_transcription_server.reading import CONFIG_VARIABLE, read_settings
from headrace_transcription_server.settings import DTYPES, TranscriptionSettings, check_binding, leaves

LEAVES = {leaf.key: leaf for leaf in leaves()}
NAME = st.text("abcä/ .-", min_size=1).map(str.strip).filter(bool)
TREES = st.builds(
    TranscriptionSettings,
    model=NAME,
    host=NAME,
    unix=st.none() | NAME,
    port=st.integers(0, 65535),
    dtype=st.sampled_from(DTYPES),
    idle_unload_s=st.floats(0, 86_400),
    max_duration_s=st.floats(1, 86_400),
    resident=st.booleans(),
    preload=st.booleans(),
    max_rows=st.integers(1, 64),
    allowed_origins=st.lists(st.sampled_from(["https://a.example", "https://b.example"]), max_size=2).map(tuple),
)


def texts_of(tree):
    texts = {}
    for name, value in asdict(tree).items():
        if value not in (None, ()):
            values = value if LEAVES[name].option.kind.is_list else [value]
            texts[name] = [str(one).lower() if isinstance(one, bool) else str(one) for one in values]
    return texts


@given(TREES)
@settings(max_examples=25, deadline=None)
def test_flags_environment_and_file_read_back_the_same_tree(tmp_path_factory, tree):
    """Any tree survives a round trip through each of the three sources."""
    texts = texts_of(tree)
    assert read_settings(texts, environ={}).settings == tree
    environ = {LEAVES[name].variable: ",".join(values) for name, values in texts.items()}
    assert read_settings({}, environ=environ).settings == tree
    path = tmp_path_factory.mktemp("settings") / "transcribe.toml"
    path.write_text(render(tree), encoding="utf-8")
    assert read_settings({}, environ={}, config=str(path)).settings == tree
    assert read_settings({}, environ={CONFIG_VARIABLE: str(path)}).settings == tree


def test_flag_wins_over_environment_over_file_over_default(tmp_path):
    """The precedence is flag, environment, file, default."""
    path = tmp_path / "transcribe.toml"
    path.write_text("port = 1")
    environ = {LEAVES["port"].variable: "2"}
    assert read_settings({}, environ={}).settings.port == 8090
    assert read_settings({}, environ={}, config=str(path)).settings.port == 1
    assert read_settings({}, environ=environ, config=str(path)).settings.port == 2
    assert read_settings({"port": ["3"]}, environ=environ, config=str(path)).settings.port == 3


@pytest.mark.parametrize("name", ["port", "idle_unload_s", "host", "resident", "dtype"])
def test_a_wrong_value_names_its_source_the_field_and_the_range(tmp_path, name):
    """An error says which source held the value, which field it is, what is allowed and what to do."""
    path = tmp_path / "transcribe.toml"
    bad = "" if name == "host" else "-7x"
    path.write_text(f"{name} = {json.dumps(bad)}")
    leaf = LEAVES[name]
    sources = [
        ({name: [bad]}, {}, None, f"flag {leaf.flag}"),
        ({}, {leaf.variable: bad}, None, f"environment variable {leaf.variable}"),
        ({}, {}, str(path), f"key {name} of {path}"),
    ]
    for flags, environ, config, origin in sources:
        with pytest.raises(InvalidSetting) as caught:
            read_settings(flags, environ=environ, config=config)
        assert caught.value.origin == origin
        message = str(caught.value)
        assert all(part in message for part in (origin, name, repr(bad), leaf.option.kind.allowed, "default"))


@pytest.mark.parametrize("text", [None, "port = =", "prot = 1"])
def test_a_file_with_a_problem_is_a_plain_error(tmp_path, text):
    """A missing or malformed file and an unknown key are InvalidSetting; the key's says what is near."""
    path = tmp_path / "transcribe.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidSetting, match="did you mean port" if text == "prot = 1" else "configuration file"):
        read_settings({}, environ={}, config=str(path))


def test_an_unknown_variable_is_told(capsys, monkeypatch):
    """A typing error in the environment is a warning that names what is near."""
    monkeypatch.setenv("HEADRACE_TRANSCRIBE_PROT", "1")
    assert main(["--print-config"]) == 0
    assert "HEADRACE_TRANSCRIBE_PROT is not a setting and is ignored; did you mean" in capsys.readouterr().err


def test_print_config_writes_a_file_that_reads_back_and_hides_keys(capsys, tmp_path):
    """What --print-config prints is a valid configuration file for the same settings, but for secrets."""
    assert main(["tiny", "--port", "7", "--resident", "--api-key", "hunter2", "--print-config"]) == 0
    path = tmp_path / "transcribe.toml"
    text = capsys.readouterr().out
    assert "hunter2" not in text
    path.write_text(text)
    read = read_settings({}, environ={}, config=str(path)).settings
    assert read == TranscriptionSettings(model="tiny", port=7, resident=True)
    assert "hunter2" not in repr(TranscriptionSettings(api_keys=("hunter2",)))


def test_other_machines_need_a_key():
    """An open address is refused without a key; a Unix socket, a key, and saying so, allow it."""
    for allowed in (
        {"host": "127.0.0.9"},
        {"host": "::1"},
        {"host": "0.0.0.0", "api_keys": ("k",)},
        {"host": "0.0.0.0", "insecure": True},
        {"host": "0.0.0.0", "unix": "/tmp/x"},
    ):
        check_binding(TranscriptionSettings(**allowed))
    with pytest.raises(UnsafeBinding, match="--api-key"):
        check_binding(TranscriptionSettings(host="0.0.0.0"))


def test_residence():
    """0 unloads after each take, a number after so long, and `resident` never."""
    assert TranscriptionSettings().residence_s == 0
    assert TranscriptionSettings(idle_unload_s=7).residence_s == 7
    assert TranscriptionSettings(idle_unload_s=7, resident=True).residence_s is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prot", "1"], "--prot"),
        (["--port", "x"], "--port"),
        (["tiny", "--model", "base"], "given twice"),
        (["--host", "0.0.0.0"], "--api-key"),
        (["/nowhere/at-all", "--port", "0"], "/nowhere/at-all"),
        (["file"], "FILE"),
        (["file", "a.wav", "--format", "doc"], "--format"),
        (["file", "a.wav", "b.wav"], "--output"),
        (["file", "a.wav", "--beam-size", "99"], "beam_size"),
    ],
)
def test_a_usage_error_is_exit_code_2_and_one_line(words, said, capsys):
    """Whatever the person at the terminal has to change is told without a traceback."""
    try:
        code = main(words)
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
