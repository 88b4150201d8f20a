"""The fields that chat and completions share."""

from typing import Annotated, Any, Literal

from attrs import frozen
from cattrs import Converter

from headrace_http_api.json_body import path_step, shown
from headrace_http_api.validation import AtLeast, Between, FieldError, make_converter

__all__ = ["ACCEPTED_WITHOUT_EFFECT", "GenerationFields", "PositiveInt", "StreamOptions", "make_request_converter"]

MAX_STOP_STRINGS = 16
MAX_BIAS = 100.0

# Known fields that never change an answer here, so that naming them as ignored would only be noise.
ACCEPTED_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

PositiveInt = Annotated[int, AtLeast(1)]
StopStrings = tuple[str, ...]
LogitBias = dict[int, float]
Priority = Literal["interactive", "batch"]


@frozen(kw_only=True)
class StreamOptions:
    """How to stream; `include_usage` adds one chunk with the usage before the end."""

    include_usage: bool = False


@frozen(kw_only=True)
class GenerationFields:
    """What every generation request may carry; None is "not given"."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: PositiveInt | None = None
    temperature: Annotated[float, Between(0, 5)] | None = None
    top_p: Annotated[float, Between(0, 1)] | None = None
    top_k: Annotated[int, AtLeast(-1)] | None = None
    min_p: Annotated[float, Between(0, 1)] | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Between(-(2**63), 2**64 - 1)] | None = None
    stop: StopStrings = ()
    ignore_eos: bool = False
    session_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    priority: Priority = "interactive"

    @property
    def cache_session_id(self) -> str | None:
        """What names the conversation to the prefix cache."""
        return self.prompt_cache_key if self.session_id is None else self.session_id

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def make_request_converter() -> Converter:
    """Make a strict converter that knows the shared fields' own forms."""
    converter = make_converter()
    converter.register_structure_hook_func(lambda kind: kind == StopStrings, _to_stop)
    converter.register_structure_hook_func(lambda kind: kind == LogitBias, _to_logit_bias)
    converter.register_structure_hook_func(lambda kind: kind == Priority, _to_priority)
    return converter


def _to_stop(value: Any, _kind: type) -> StopStrings:
    entries: Any = [value] if isinstance(value, str) else value
    if not isinstance(entries, list):
        raise FieldError(f"is {shown(value)}; it must be a string or a list of strings")
    if len(entries) > MAX_STOP_STRINGS:
        raise FieldError(f"has {len(entries)} entries; at most {MAX_STOP_STRINGS} stop strings are served")
    for index, entry in enumerate(entries):
        if not isinstance(entry, str) or not entry:
            subpath = "" if isinstance(value, str) else f"[{index}]"
            raise FieldError(f"is {shown(entry)}; it must be a string that is not empty", subpath=subpath)
    return tuple(entries)


def _to_priority(value: Any, _kind: type) -> Priority:
    if value not in ("interactive", "batch"):
        raise FieldError(f'is {shown(value)}; it must be "interactive" or "batch"')
    return value


def _to_logit_bias(value: Any, _kind: type) -> LogitBias:
    if not isinstance(value, dict):
        raise FieldError(f"is {shown(value)}; it must be an object from token ids to numbers")
    bias: LogitBias = {}
    for key, amount in value.items():
        subpath = path_step(key)
        if len(key) > 10 or not key.isascii() or not key.isdecimal() or key != str(int(key)):
            raise FieldError("is no token id; write ids as decimal digits in quotes", subpath=subpath)
        if type(amount) not in (int, float) or not -MAX_BIAS <= amount <= MAX_BIAS:
            raise FieldError(
                f"is {shown(amount)}; it must be a number between -{MAX_BIAS:.0f} and {MAX_BIAS:.0f}", subpath=subpath
            )
        bias[int(key)] = float(amount)
    return bias
