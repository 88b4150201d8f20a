"""Flags, environment and configuration file into one settings tree: flag over environment over file over default."""

import tomllib
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from attrs import frozen

from headrace_chat_server.errors import InvalidSetting
from headrace_chat_server.kinds import from_texts, from_toml
from headrace_chat_server.settings import Leaf, Settings, build, leaves

__all__ = ["CONFIG_VARIABLE", "Read", "flag_texts", "read_settings"]

CONFIG_VARIABLE = "HEADRACE_CONFIG"
"""The variable that names the configuration file, as `--config` does."""

_SIBLING_PREFIX = "HEADRACE_TRANSCRIBE_"


@frozen(kw_only=True)
class Read:
    """What reading gave: the tree, and remarks for the person who started the program."""

    settings: Settings
    warnings: tuple[str, ...] = ()


def read_settings(
    flags: Mapping[str, Sequence[str]],
    *,
    environ: Mapping[str, str],
    config: str | None = None,
) -> Read:
    """Merge the three sources.

    Args:
        flags: texts by dotted key, as `flag_texts` collects them.
        environ: the environment; only `HEADRACE_*` is looked at.
        config: the configuration file; None falls back to the variable `HEADRACE_CONFIG`, then to no file.

    Raises:
        InvalidSetting: for a value outside its range, an unknown key, or a file that cannot be read.
    """
    config = config or environ.get(CONFIG_VARIABLE) or None
    values = {} if config is None else _from_file(Path(config))
    values |= _from_environment(environ)
    values |= _from_flags(flags)
    return Read(settings=build(values), warnings=tuple(_unknown_variables(environ)))


def flag_texts(namespace: Namespace) -> dict[str, list[str]]:
    """Collect the flags that were given from a parsed command line whose destinations are dotted keys."""
    given = vars(namespace)
    return {leaf.key: given[leaf.key] for leaf in leaves() if given.get(leaf.key) is not None}


def _from_flags(flags: Mapping[str, Sequence[str]]) -> dict[str, object]:
    return {
        leaf.key: _value_from_texts(leaf, flags[leaf.key], f"flag {leaf.flag}")
        for leaf in leaves()
        if leaf.key in flags
    }


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for leaf in leaves():
        text = environ.get(leaf.variable)
        if text is not None:
            texts = text.split(",") if leaf.option.kind.is_list else [text]
            values[leaf.key] = _value_from_texts(leaf, texts, f"environment variable {leaf.variable}")
    return values


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    known = [leaf.variable for leaf in leaves()] + [CONFIG_VARIABLE]
    for name in sorted(environ):
        is_ours = name.startswith("HEADRACE_") and not name.startswith(_SIBLING_PREFIX)
        if is_ours and name not in known:
            yield f"environment variable {name} is not a setting and is ignored{_suggestion(name, known)}"


def _from_file(path: Path) -> dict[str, object]:
    by_key = {leaf.key: leaf for leaf in leaves()}
    values: dict[str, object] = {}
    for key, value in _flatten(_parse_file(path)):
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


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _value_from_texts(leaf: Leaf, texts: Sequence[str], origin: str) -> object:
    shown = repr(",".join(texts))
    try:
        value = from_texts(leaf.option.kind, texts)
    except ValueError:
        value = None
    return _checked(leaf, value, shown=shown, origin=origin)


def _checked(leaf: Leaf, value: object, *, shown: str, origin: str) -> object:
    kind = leaf.option.kind
    if kind.accepts(value):
        return value
    problem = "is not usable" if leaf.option.is_secret else f"is {shown}"
    remedy = f"Change it or leave it out{_fallback(leaf)}"
    raise InvalidSetting(
        f"{origin}: {leaf.key} {problem}; it must be {kind.allowed}. {remedy}", origin=origin, field=leaf.key
    )


def _fallback(leaf: Leaf) -> str:
    shown = leaf.default not in (None, ())
    return f" to get the default {leaf.default!r}" if shown else " to get the default"


def _suggestion(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; the settings are {', '.join(known)}"
