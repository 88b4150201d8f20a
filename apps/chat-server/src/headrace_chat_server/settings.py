"""The one tree of settings. Every leaf is a flag, a key of the configuration file and a `HEADRACE_*` variable."""

# ruff: noqa: RUF009  -- attrs fields with immutable defaults

from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any, Literal, TypeVar, cast

from attrs import Attribute, field, fields, frozen, has

from headrace_chat_server.errors import InvalidSetting, UnsafeBinding
from headrace_chat_server.kinds import Choice, Integer, Kind, Number, Pattern, Size, Switch, Text, TextList

__all__ = [
    "DTYPES",
    "Dtype",
    "EngineSettings",
    "Leaf",
    "LogLevel",
    "Option",
    "SamplingSettings",
    "ServerSettings",
    "Settings",
    "Transport",
    "WhisperSettings",
    "build",
    "check_binding",
    "is_loopback",
    "leaves",
]

T = TypeVar("T")

Dtype = Literal["auto", "checkpoint", "float32", "bfloat16", "float16"]
Transport = Literal["process", "thread"]
LogLevel = Literal["debug", "info", "warning", "error"]

KV_PATTERN = r"off|[234568]|config|turbo:k\d+v\d+"
DTYPES = ("auto", "checkpoint", "float32", "bfloat16", "float16")


@frozen(kw_only=True)
class Option:
    """What the command line and the checks need to know of one setting.

    Attributes:
        flag: the flag's name without dashes, where it differs from the field's.
        aliases: further flags of the same meaning.
        is_secret: the value is never printed.
    """

    kind: Kind
    help: str
    flag: str | None = None
    aliases: tuple[str, ...] = ()
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
class ServerSettings:
    """Where and how the HTTP server listens, and how it stops."""

    host: str = _setting("127.0.0.1", Option(kind=Text(), help="address to listen on"))
    port: int = _setting(8080, Option(kind=Integer(0, 65535), help="port to listen on; 0 picks a free one"))
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
    keep_alive_s: float = _setting(
        10.0, Option(kind=Number(0, 3600), help="seconds of silence after which a stream sends a comment; 0 sends none")
    )
    stall_timeout_s: float = _setting(
        60.0,
        Option(kind=Number(0.1, 3600), help="seconds after which a stream whose client reads nothing is dropped"),
    )
    max_unread_tokens: int = _setting(
        4096,
        Option(kind=Integer(1, 10_000_000), help="most tokens that wait for a client that is behind; more drop it"),
    )
    drain_timeout_s: float = _setting(
        30.0, Option(kind=Number(0, 3600), help="seconds that running requests get to finish after Ctrl-C")
    )


@frozen(kw_only=True)
class EngineSettings:
    """How the model runs."""

    max_rows: int = _setting(
        8,
        Option(
            kind=Integer(1, 256),
            aliases=("batch", "decode-concurrency"),
            help="most requests in the running batch; 1 runs them strictly one after the other",
        ),
    )
    dtype: Dtype = _setting(
        "auto",
        Option(kind=Choice(DTYPES), help="weights in memory; auto: the checkpoint's own on GPUs, float32 on CPU"),
    )
    transport: Transport = _setting(
        "process",
        Option(kind=Choice(("process", "thread")), flag="engine", help="run the model in a child process or a thread"),
    )
    max_queue: int = _setting(
        64, Option(kind=Integer(1, 100_000), help="most requests running and waiting together; more get a 429")
    )
    prefill_chunk: int = _setting(
        512,
        Option(
            kind=Integer(1, 1_000_000),
            help="most prompt tokens computed in one step, all requests together; running replies wait that long",
        ),
    )
    kv: str = _setting(
        "off",
        Option(
            kind=Pattern(KV_PATTERN, "off, 2, 3, 4, 5, 6, 8, config or turbo:k8v3 (bits of keys and values)"),
            help="how keys and values are stored: off, bits such as 8, config (the model's kv_config.json), turbo:k8v3",
        ),
    )
    kv_budget: int | None = _setting(
        None,
        Option(kind=Size(1), help="most bytes of keys and values of running requests, such as 4G; others wait"),
    )
    prompt_cache: int = _setting(
        2 * 1024**3,
        Option(kind=Size(), help="most bytes of stored prompt prefixes, such as 2G; 0 stores none"),
    )
    prompt_cache_dir: str | None = _setting(
        None,
        Option(
            kind=Text(),
            help="folder that keeps stored prompts from one run to the next; they can be read off its files",
        ),
    )
    ignore_fit: bool = _setting(False, Option(kind=Switch(), help="load the model even if it does not fit into memory"))
    max_tokens: int | None = _setting(
        None,
        Option(kind=Integer(1, 10_000_000), help="reply limit of requests that set none; default: the model's context"),
    )


@frozen(kw_only=True)
class SamplingSettings:
    """Sampling of requests that leave it open; what is unset here comes from the model, then from the built-ins."""

    temperature: float | None = _setting(
        None, Option(kind=Number(0, 5), help="default sampling temperature; 0 is greedy")
    )
    top_p: float | None = _setting(None, Option(kind=Number(0, 1), help="default nucleus mass; 0 and 1 are off"))
    top_k: int | None = _setting(
        None, Option(kind=Integer(0, 1_000_000), help="default number of candidates; 0 is off")
    )
    min_p: float | None = _setting(None, Option(kind=Number(0, 1), help="default floor relative to the best token"))


@frozen(kw_only=True)
class WhisperSettings:
    """Whether audio is transcribed too."""

    model: str | None = _setting(
        None,
        Option(
            kind=Text(),
            flag="whisper-model",
            help="Whisper model that also serves /v1/audio: a short name such as whisper-base, a folder or a hub id",
        ),
    )
    idle_unload_s: float = _setting(
        0.0,
        Option(
            kind=Number(0, 86_400),
            flag="whisper-idle-unload",
            help="seconds without work after which it leaves memory; 0: after each transcription",
        ),
    )
    resident: bool = _setting(
        False, Option(kind=Switch(), flag="whisper-resident", help="keep it in memory, once it is loaded")
    )


@frozen(kw_only=True)
class Settings:
    """Everything that `headrace serve` can be told.

    Attributes:
        model: a folder, a GGUF file, a hub id or the short name of a packaged model; None is the default model.
        chat_template: path of a file; None uses the model's own template.
    """

    model: str | None = _setting(None, Option(kind=Text(), help="model to serve, as the MODEL argument"))
    chat_template: str | None = _setting(
        None, Option(kind=Text(), help="file with a Jinja chat template to use instead of the model's own")
    )
    server: ServerSettings = field(factory=ServerSettings)
    engine: EngineSettings = field(factory=EngineSettings)
    sampling: SamplingSettings = field(factory=SamplingSettings)
    whisper: WhisperSettings = field(factory=WhisperSettings)


@frozen(kw_only=True)
class Leaf:
    """One setting with its names.

    Attributes:
        path: of the fields from the root of the tree; dotted, it is the key of the configuration file.
    """

    path: tuple[str, ...]
    option: Option
    default: object

    @property
    def key(self) -> str:
        """The dotted key of the configuration file."""
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        """The flag, dashes included."""
        return "--" + (self.option.flag or self.path[-1].replace("_", "-"))

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "HEADRACE_" + self.flag[2:].replace("-", "_").upper()


def leaves(cls: type = Settings, path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """List the settings below a class of the tree, in order of declaration."""
    for attribute in fields(cls):
        here = (*path, attribute.name)
        if has(attribute.type):
            yield from leaves(cast("type", attribute.type), here)
        else:
            yield Leaf(path=here, option=attribute.metadata["option"], default=attribute.default)


def build(values: dict[str, object]) -> Settings:
    """Make the tree from values by dotted key; what is missing keeps its default.

    Raises:
        InvalidSetting: when a value is outside its range.
    """
    groups: dict[str, dict[str, object]] = {attribute.name: {} for attribute in fields(Settings) if has(attribute.type)}
    top: dict[str, Any] = {}
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        (groups[group] if group else top)[name] = value
    for attribute in fields(Settings):
        if has(attribute.type):
            top[attribute.name] = cast("Any", attribute.type)(**groups[attribute.name])
    return Settings(**top)


def is_loopback(host: str) -> bool:
    """Tell whether an address can only be reached from this machine; a name other than localhost counts as open."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def check_binding(server: ServerSettings) -> None:
    """Refuse an address that other machines can reach without a key (design D17).

    Raises:
        UnsafeBinding: unless the host is loopback, a key is set, or `insecure` says that it is meant.
    """
    if not (is_loopback(server.host) or server.api_keys or server.insecure):
        raise UnsafeBinding(server.host)
