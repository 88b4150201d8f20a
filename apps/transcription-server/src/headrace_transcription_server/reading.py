"""Flags, environment and configuration file into one settings tree: flag over environment over file over default."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from attrs import frozen

from headrace_transcription_server.errors import InvalidSetting
from headrace_transcription_server.kinds import from_texts, from_toml
from headrace_transcription_server.settings import PREFIX, Leaf, TranscriptionSettings, leaves

__all__ = ["CONFIG_VARIABLE", "Read", "read_settings"]

CONFIG_VARIABLE = f"{PREFIX}CONFIG"
"""The variable that names the configuration file, as `--config` does."""


@frozen(kw_only=True)
class Read:
    """What reading gave: the tree, and remarks for the person who started the program."""

    settings: TranscriptionSettings
    warnings: tuple[str, ...] = ()


def read_settings(flags: Mapping[str, Sequence[str]], *, environ: Mapping[str, str], config: str | None = None) -> Read:
    """Merge the three sources.

    Args:
        flags: texts by key.
        environ: the environment; only `HEADRACE_TRANSCRIBE_*` is looked at.
        config: the configuration file; None falls back to `HEADRACE_TRANSCRIBE_CONFIG`, then to no file.

    Raises:
        InvalidSetting: for a value outside its range, an unknown key, or a file that cannot be read.
    """
    config = config or environ.get(CONFIG_VARIABLE) or None
    values: dict[str, Any] = {} if config is None else _from_file(Path(config))
    for leaf in leaves():
        if leaf.variable in environ:
            text = environ[leaf.variable]
            texts = text.split(",") if leaf.option.kind.is_list else [text]
            values[leaf.key] = _from_texts(leaf, texts, f"environment variable {leaf.variable}")
        if leaf.key in flags:
            values[leaf.key] = _from_texts(leaf, flags[leaf.key], f"flag {leaf.flag}")
    return Read(settings=TranscriptionSettings(**values), warnings=tuple(_unknown_variables(environ)))


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    known = [leaf.variable for leaf in leaves()] + [CONFIG_VARIABLE]
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            yield f"environment variable {name} is not a setting and is ignored{_suggestion(name, known)}"


def _from_file(path: Path) -> dict[str, Any]:
    by_key = {leaf.key: leaf for leaf in leaves()}
    values: dict[str, object] = {}
    for key, value in _parse_file(path).items():
        origin = f"key {key} of {path}"
        if key not in by_key:
            message = f"{origin} is not a setting{_suggestion(key, list(by_key))}"
            raise InvalidSetting(message, origin=origin, field=key)
        typed = from_toml(by_key[key].option.kind, value)
        values[key] = _checked(by_key[key], typed, shown=repr(value), origin=origin)
    return values


def _parse_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = error.strerror or str(error)
    except ValueError as error:
        problem = f"not valid TOML: {error}"
    message = f"configuration file {str(path)!r} cannot be read ({problem}): pass an existing TOML file to --config"
    raise InvalidSetting(message, origin="configuration file", field="config")


def _from_texts(leaf: Leaf, texts: Sequence[str], origin: str) -> object:
    try:
        value = from_texts(leaf.option.kind, texts)
    except ValueError:
        value = None
    return _checked(leaf, value, shown=repr(",".join(texts)), origin=origin)


def _checked(leaf: Leaf, value: object, *, shown: str, origin: str) -> object:
    kind = leaf.option.kind
    if kind.accepts(value):
        return value
    problem = "is not usable" if leaf.option.is_secret else f"is {shown}"
    fallback = f" {leaf.default!r}" if leaf.default not in (None, ()) else ""
    message = f"{origin}: {leaf.key} {problem}; it must be {kind.allowed}. Change it or leave it out to get the default"
    raise InvalidSetting(f"{message}{fallback}", origin=origin, field=leaf.key)


def _suggestion(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; the settings are {', '.join(known)}"
