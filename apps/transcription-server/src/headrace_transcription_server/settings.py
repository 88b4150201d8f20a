"""The one tree of settings. Every field is a flag, a key of the file and a `HEADRACE_TRANSCRIBE_*` variable."""

# ruff: noqa: RUF009  -- attrs fields with immutable defaults

from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any, Literal, TypeVar, cast

from attrs import Attribute, field, fields, frozen

from headrace_transcription_server.errors import InvalidSetting, UnsafeBinding
from headrace_transcription_server.kinds import Choice, Integer, Kind, Number, Switch, Text, TextList

__all__ = [
    "DTYPES",
    "Leaf",
    "LogLevel",
    "Option",
    "PREFIX",
    "TranscriptionSettings",
    "check_binding",
    "is_loopback",
    "leaves",
]

T = TypeVar("T")

LogLevel = Literal["debug", "info", "warning", "error"]
Dtype = Literal["auto", "checkpoint", "float32", "bfloat16", "float16"]

PREFIX = "HEADRACE_TRANSCRIBE_"
"""What the names of all variables of this program begin with."""

DTYPES = ("auto", "checkpoint", "float32", "bfloat16", "float16")


@frozen(kw_only=True)
class Option:
    """What the command line and the checks need to know of one setting.

    Attributes:
        flag: the flag's name without dashes, where it differs from the field's.
        is_secret: the value is never printed.
    """

    kind: Kind
    help: str
    flag: str | None = None
    is_secret: bool = False


def _check(_instance: object, attribute: "Attribute[Any]", value: object) -> None:
    option = cast("Option", attribute.metadata["option"])
    if value is attribute.default or option.kind.accepts(value):
        return
    shown = "the given value" if option.is_secret else repr(value)
    message = f"{attribute.name} is {shown}; it must be {option.kind.allowed}"
    raise InvalidSetting(message, origin="code", field=attribute.name)


def _setting(default: T, option: Option) -> T:
    return field(default=default, validator=_check, repr=not option.is_secret, metadata={"option": option})


@frozen(kw_only=True)
class TranscriptionSettings:
    """Everything that `headrace-transcribe` can be told.

    Attributes:
        unix: path of a socket to listen on instead of host and port.
    """

    model: str = _setting(
        "whisper-base", Option(kind=Text(), help="Whisper model: a short name, a folder or a hub id, as MODEL")
    )
    dtype: Dtype = _setting(
        "auto",
        Option(kind=Choice(DTYPES), help="weights in memory; auto: the checkpoint's own on GPUs, float32 on CPU"),
    )
    host: str = _setting("127.0.0.1", Option(kind=Text(), help="address to listen on"))
    port: int = _setting(8090, Option(kind=Integer(0, 65535), help="port to listen on; 0 picks a free one"))
    unix: str | None = _setting(
        None, Option(kind=Text(), help="path of a Unix socket to listen on, instead of host and port")
    )
    idle_unload_s: float = _setting(
        0.0,
        Option(
            kind=Number(0, 86_400),
            flag="idle-unload",
            help="seconds without work after which the model leaves memory; 0: after each transcription",
        ),
    )
    resident: bool = _setting(False, Option(kind=Switch(), help="keep the model in memory, once it is loaded"))
    preload: bool = _setting(
        False, Option(kind=Switch(), help="load the model before listening; what is wrong with it ends the start")
    )
    max_rows: int = _setting(
        8, Option(kind=Integer(1, 64), help="most transcriptions that run at a time, their windows as one batch")
    )
    max_queue: int = _setting(
        64, Option(kind=Integer(1, 100_000), help="most transcriptions that wait; further ones get a 429")
    )
    max_duration_s: float = _setting(
        4 * 3600.0,
        Option(kind=Number(1, 86_400), flag="max-duration", help="longest audio that is taken, in seconds"),
    )
    session_timeout_s: float = _setting(
        600.0,
        Option(
            kind=Number(1, 86_400),
            flag="session-timeout",
            help="seconds after which a session that hears nothing is closed",
        ),
    )
    api_keys: tuple[str, ...] = _setting(
        (), Option(kind=TextList(), flag="api-key", is_secret=True, help="key that clients must send; repeatable")
    )
    insecure: bool = _setting(
        False, Option(kind=Switch(), help="allow an address that other machines can reach without an API key")
    )
    allowed_origins: tuple[str, ...] = _setting(
        (), Option(kind=TextList(), help="web origin that browsers may call from; repeatable")
    )
    strict: bool = _setting(
        False, Option(kind=Switch(), help="refuse request fields that nobody knows, instead of naming them in a header")
    )
    log_level: LogLevel = _setting(
        "warning", Option(kind=Choice(("debug", "info", "warning", "error")), help="least level that is logged")
    )
    drain_timeout_s: float = _setting(
        30.0,
        Option(
            kind=Number(0, 3600),
            flag="drain-timeout",
            help="seconds that running transcriptions get to finish after Ctrl-C",
        ),
    )

    @property
    def residence_s(self) -> float | None:
        """Seconds without work after which the model is unloaded; None if it stays."""
        return None if self.resident else float(self.idle_unload_s)


@frozen(kw_only=True)
class Leaf:
    """One setting with its names.

    Attributes:
        key: of the configuration file, and the field's name.
    """

    key: str
    option: Option
    default: object

    @property
    def flag(self) -> str:
        """The flag, dashes included."""
        return "--" + (self.option.flag or self.key.replace("_", "-"))

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + self.flag[2:].replace("-", "_").upper()


def leaves() -> Iterator[Leaf]:
    """List the settings, in order of declaration."""
    for attribute in fields(TranscriptionSettings):
        yield Leaf(key=attribute.name, option=attribute.metadata["option"], default=attribute.default)


def is_loopback(host: str) -> bool:
    """Tell whether an address can only be reached from this machine; a name other than localhost counts as open."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def check_binding(settings: TranscriptionSettings) -> None:
    """Refuse an address that other machines can reach without a key (design D17).

    Raises:
        UnsafeBinding: unless it is a Unix socket or loopback, a key is set, or `insecure` says that it is meant.
    """
    is_closed = settings.unix is not None or is_loopback(settings.host)
    if not (is_closed or settings.api_keys or settings.insecure):
        raise UnsafeBinding(settings.host)
