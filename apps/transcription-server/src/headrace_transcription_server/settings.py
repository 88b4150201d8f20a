"""The one tree of settings. Every field is a flag, a key of the file and a `HEADRACE_TRANSCRIBE_*` variable."""

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from attrs import Attribute, field, fields, frozen

from headrace_transcription_server.errors import InvalidSetting

__all__ = ["Option", "PREFIX", "TranscriptionSettings", "flag_of", "options", "read_settings", "variable_of"]

T = TypeVar("T")

PREFIX = "HEADRACE_TRANSCRIBE_"
"""What the names of all variables of this program begin with."""


@frozen(kw_only=True)
class Option:
    """What a value may be, and how a text becomes one.

    Attributes:
        allowed: the allowed values, in words that follow "it must be".
    """

    help: str
    allowed: str
    parse: Callable[[str], object]
    accepts: Callable[[object], bool]


def _integer(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(text)
    return int(text)


def _text(help_text: str) -> Option:
    return Option(
        help=help_text,
        allowed="a text of at least one character",
        parse=str,
        accepts=lambda value: isinstance(value, str) and value != "",
    )


def _check(_instance: object, attribute: "Attribute[Any]", value: object) -> None:
    option: Option = attribute.metadata["option"]
    if not option.accepts(value):
        message = f"{attribute.name} is {value!r}; it must be {option.allowed}"
        raise InvalidSetting(message, origin="code", field=attribute.name)


def _setting(default: T, option: Option) -> T:
    return field(default=default, validator=_check, metadata={"option": option})


@frozen(kw_only=True)
class TranscriptionSettings:
    """Everything that `headrace-transcribe` can be told.

    Attributes:
        model: short name or folder of a Whisper model.
        idle_unload_s: seconds without a request after which the weights leave memory; 0 keeps them.
    """

    model: str = _setting("whisper-base", _text("Whisper model: a short name or a folder"))
    host: str = _setting("127.0.0.1", _text("address to listen on"))
    port: int = _setting(
        8090,
        Option(
            help="port to listen on; 0 picks a free one",
            allowed="an integer from 0 to 65535",
            parse=_integer,
            accepts=lambda value: type(value) is int and 0 <= value <= 65535,
        ),
    )
    idle_unload_s: float = _setting(
        300.0,
        Option(
            help="seconds without a request after which the weights leave memory; 0 keeps them",
            allowed="a number from 0 to 86400",
            parse=float,
            accepts=lambda value: type(value) in {int, float} and 0 <= value <= 86_400,  # type: ignore[operator]
        ),
    )


def options() -> dict[str, Option]:
    """List the settings by name, in order of declaration."""
    return {attribute.name: attribute.metadata["option"] for attribute in fields(TranscriptionSettings)}


def flag_of(name: str) -> str:
    """Tell the flag of a setting, dashes included."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """Tell the environment variable of a setting."""
    return PREFIX + name.upper()


def read_settings(
    flags: Mapping[str, str], *, environ: Mapping[str, str], config: str | None = None
) -> TranscriptionSettings:
    """Merge flags over environment over configuration file over defaults.

    Raises:
        InvalidSetting: for a value outside its range, an unknown key, or a file that cannot be read.
    """
    config = config or environ.get(f"{PREFIX}CONFIG") or None
    values = {} if config is None else _from_file(Path(config))
    for name in options():
        variable = variable_of(name)
        if variable in environ:
            values[name] = _from_text(name, environ[variable], f"environment variable {variable}")
        if name in flags:
            values[name] = _from_text(name, flags[name], f"flag {flag_of(name)}")
    return TranscriptionSettings(**values)


def _from_text(name: str, text: str, origin: str) -> object:
    try:
        value = options()[name].parse(text)
    except ValueError:
        value = None
    return _checked(name, value, shown=repr(text), origin=origin)


def _from_file(path: Path) -> dict[str, Any]:
    origin = f"configuration file {path}"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"{origin} cannot be read ({error}): pass an existing TOML file to --config"
        raise InvalidSetting(message, origin=origin, field="config") from None
    for key in table:
        if key not in options():
            message = f"{origin}: {key!r} is not a setting; the settings are {', '.join(options())}"
            raise InvalidSetting(message, origin=origin, field=key)
    return {key: _checked(key, value, shown=repr(value), origin=origin) for key, value in table.items()}


def _checked(name: str, value: object, *, shown: str, origin: str) -> object:
    option = options()[name]
    if option.accepts(value):
        return value
    message = f"{origin}: {name} is {shown}; it must be {option.allowed}. Change it or leave it out to get the default"
    raise InvalidSetting(message, origin=origin, field=name)
