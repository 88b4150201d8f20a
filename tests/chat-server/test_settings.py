"""Laws of the settings tree: three sources, one meaning."""

import tomllib
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_chat_server.cli import make_parser
from headrace_chat_server.errors import InvalidSetting, UnsafeBinding
from headrace_chat_server.kinds import Choice, Integer, Kind, Number, Pattern, Size, Switch, Text, TextList
from headrace_chat_server.reading import flag_texts, read_settings
from headrace_chat_server.settings import (
    EngineSettings,
    Leaf,
    ServerSettings,
    Settings,
    build,
    check_binding,
    is_loopback,
    leaves,
)

LEAVES = list(leaves())
WORD = st.text("abcdefghijklmnopqrstuvwxyzäß/:-. '\"\\", min_size=1, max_size=12).map(str.strip).filter(bool)


def values_of(kind: Kind) -> st.SearchStrategy[object]:
    match kind:
        case Text():
            return WORD.filter(lambda text: not text.startswith("-"))
        case TextList():
            return st.lists(WORD.filter(lambda text: not text.startswith("-")), min_size=1, max_size=3).map(tuple)
        case Switch():
            return st.booleans()
        case Integer(low, high):
            return st.integers(low, high)
        case Number(low, high):
            return st.floats(low, high)
        case Size(low):
            return st.integers(low, 2**45)
        case Pattern(expression):
            return st.from_regex(expression, fullmatch=True, alphabet=st.characters(codec="ascii"))
        case Choice(words):
            return st.sampled_from(words)
        case _:
            raise AssertionError(kind)


VALUES = st.fixed_dictionaries({}, optional={leaf.key: values_of(leaf.option.kind) for leaf in LEAVES})


def get(tree: Settings, key: str) -> object:
    value: object = tree
    for name in key.split("."):
        value = getattr(value, name)
    return value


def as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_flags(values: Mapping[str, object]) -> list[str]:
    words: list[str] = []
    for leaf in LEAVES:
        if leaf.key in values:
            value = values[leaf.key]
            if isinstance(leaf.option.kind, Switch):
                words.append(leaf.flag if value else f"--no-{leaf.flag[2:]}")
                continue
            for item in value if isinstance(value, tuple) else (value,):
                words += [leaf.flag, as_text(item)]
    return words


def as_environ(values: Mapping[str, object]) -> dict[str, str]:
    return {
        leaf.variable: ",".join(values[leaf.key]) if leaf.option.kind.is_list else as_text(values[leaf.key])
        for leaf in LEAVES
        if leaf.key in values
    }


def toml_value(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return as_text(value)


def as_toml(values: Mapping[str, object]) -> str:
    text = "".join(f"{key} = {toml_value(value)}\n" for key, value in values.items())
    tomllib.loads(text)
    return text


def from_flags(words: list[str], environ: Mapping[str, str] | None = None, config: str | None = None) -> Settings:
    namespace = make_parser().parse_args(["serve", *words])
    return read_settings(flag_texts(namespace), environ=environ or {}, config=config).settings


@given(VALUES)
@settings(max_examples=30, deadline=None)
def test_flags_environment_and_file_read_back_the_same_tree(tmp_path_factory, values):
    """Any tree of settings survives a round trip through each of the three sources."""
    tree = build(values)
    assert from_flags(as_flags(values)) == tree
    path = tmp_path_factory.mktemp("settings") / "headrace.toml"
    path.write_text(as_toml(values), encoding="utf-8")
    assert read_settings({}, environ={}, config=str(path)).settings == tree
    assert read_settings({}, environ={"HEADRACE_CONFIG": str(path)}).settings == tree
    assert read_settings({}, environ=as_environ(values)).settings == tree


DISTINCT: dict[str, tuple[object, object, object]] = {
    "Text": ("a", "b", "c"),
    "TextList": (("a",), ("b",), ("c",)),
    "Integer": (1, 2, 3),
    "Number": (0.25, 0.5, 0.75),
    "Size": (1, 2048, 3),
    "Pattern": ("4", "8", "turbo:k8v3"),
}


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("512", 512), ("1K", 1024), ("1.5m", 1_572_864), ("2G", 2**31), ("2GiB", 2**31), ("1 tb", 2**40)],
)
def test_sizes_take_units(tmp_path, text, value):
    """Sizes are read with units in flags, in the environment and in the file."""
    path = tmp_path / "headrace.toml"
    path.write_text(f'engine.prompt_cache = "{text}"')
    assert from_flags(["--prompt-cache", text]).engine.prompt_cache == value
    assert from_flags([], {"HEADRACE_PROMPT_CACHE": text}).engine.prompt_cache == value
    assert from_flags([], {}, str(path)).engine.prompt_cache == value


@pytest.mark.parametrize("text", ["", "-1", "2X", "G", "1e9", "nan"])
def test_what_is_no_size_is_refused(tmp_path, text):
    """A wrong size is named in each source."""
    path = tmp_path / "headrace.toml"
    path.write_text(f'engine.prompt_cache = "{text}"')
    with pytest.raises(InvalidSetting, match="512M"):
        from_flags([], {}, str(path))
    with pytest.raises(InvalidSetting, match="512M"):
        from_flags(["--prompt-cache=" + text])


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.key)
def test_flag_wins_over_environment_over_file_over_default(tmp_path, leaf: Leaf):
    """For every setting the precedence is flag, environment, file, default."""
    kind = leaf.option.kind
    if isinstance(kind, Choice):
        in_file, in_environ, in_flag = kind.words[0], kind.words[1], kind.words[0]
    elif isinstance(kind, Switch):
        in_file, in_environ, in_flag = True, False, True
    else:
        in_file, in_environ, in_flag = DISTINCT[type(kind).__name__]
    path = tmp_path / "headrace.toml"
    path.write_text(as_toml({leaf.key: in_file}))
    environ = as_environ({leaf.key: in_environ})
    flags = as_flags({leaf.key: in_flag})
    assert get(from_flags([]), leaf.key) == leaf.default
    assert get(from_flags([], {}, str(path)), leaf.key) == in_file
    assert get(from_flags([], environ, str(path)), leaf.key) == in_environ
    assert get(from_flags(flags, environ, str(path)), leaf.key) == in_flag


def wrong_value(kind: Kind) -> str:
    return "" if isinstance(kind, Text | TextList) else "-7.5x"


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.key)
def test_a_wrong_value_names_its_source_the_field_the_range_and_hides_secrets(tmp_path, leaf: Leaf):
    """An error says which source held the value, which field it is, what is allowed and what to do."""
    bad = wrong_value(leaf.option.kind)
    path = tmp_path / "headrace.toml"
    path.write_text(f"{leaf.key} = {toml_value((bad,) if leaf.option.kind.is_list else bad)}\n")
    sources = [
        ({leaf.key: [bad]}, {}, None, f"flag {leaf.flag}"),
        ({}, {leaf.variable: bad}, None, f"environment variable {leaf.variable}"),
        ({}, {}, str(path), f"key {leaf.key} of {path}"),
    ]
    for flags, environ, config, origin in sources:
        with pytest.raises(InvalidSetting) as caught:
            read_settings(flags, environ=environ, config=config)
        message = str(caught.value)
        assert caught.value.origin == origin
        assert caught.value.field == leaf.key
        assert origin in message
        assert leaf.option.kind.allowed in message
        assert "default" in message
        assert leaf.option.is_secret or repr(bad) in message


def test_every_setting_has_its_own_names():
    """No two settings share a flag, an alias, a variable or a key."""
    flags = [name for leaf in LEAVES for name in (leaf.flag[2:], *leaf.option.aliases)]
    assert len(set(flags)) == len(flags)
    assert len({leaf.variable for leaf in LEAVES}) == len(LEAVES)


@pytest.mark.parametrize("text", ["server.prot = 1", "[engin]\nmax_rows = 2", "[server]\nhost.x = 1"])
def test_an_unknown_key_is_an_error_that_names_it(tmp_path, text):
    """Nothing in a file is ignored."""
    path = tmp_path / "headrace.toml"
    path.write_text(text)
    with pytest.raises(InvalidSetting, match="is not a setting"):
        read_settings({}, environ={}, config=str(path))


def test_a_misspelt_key_suggests_the_right_one(tmp_path):
    """A near miss is answered with the name that was meant."""
    path = tmp_path / "headrace.toml"
    path.write_text("[server]\nprot = 1")
    with pytest.raises(InvalidSetting, match=r"did you mean server\.port\?"):
        read_settings({}, environ={}, config=str(path))


@pytest.mark.parametrize("content", [None, b"port = = 1", b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_a_plain_error(tmp_path, content):
    """A missing, malformed or undecodable file is one InvalidSetting."""
    path = tmp_path / "headrace.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidSetting, match="cannot be read"):
        read_settings({}, environ={}, config=str(path))


def test_an_unknown_variable_is_a_warning():
    """A stray HEADRACE_ variable never stops the server, and is never silent."""
    read = read_settings({}, environ={"HEADRACE_PROT": "1", "PATH": "x"})
    assert read.settings == Settings()
    (warning,) = read.warnings
    assert "HEADRACE_PROT" in warning
    assert "did you mean HEADRACE_PORT?" in warning


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "1", -0.1])
def test_values_from_code_are_checked_too(value):
    """The tree itself refuses what the sources refuse; a bool is no number and NaN is nothing."""
    with pytest.raises(InvalidSetting):
        build({"sampling.top_p": value})
    with pytest.raises(InvalidSetting):
        EngineSettings(max_rows=value)


def test_secrets_are_in_no_representation():
    """API keys never reach a log through repr."""
    assert "s3cret" not in repr(Settings(server=ServerSettings(api_keys=("s3cret",))))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST"])
def test_loopback_needs_no_key(host):
    """D17: loopback is safe by itself."""
    assert is_loopback(host)
    check_binding(ServerSettings(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", "127.0.0.1.example.org"])
def test_other_addresses_need_a_key_or_insecure(host):
    """D17: anything else needs a key, or the word that it is meant."""
    with pytest.raises(UnsafeBinding, match="--api-key"):
        check_binding(ServerSettings(host=host))
    check_binding(ServerSettings(host=host, api_keys=("k",)))
    check_binding(ServerSettings(host=host, insecure=True))
