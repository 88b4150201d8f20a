"""The fields that chat and completions share."""

from typing import Annotated, Any, Literal

from attrs import frozen
from cattrs import Converter

from headrace_http_api.errors import InvalidRequest
from headrace_http_api.grammar_fields import GrammarFields, register_grammar_hooks
from headrace_http_api.json_body import shown
from headrace_http_api.sampling_fields import SamplingFields, register_sampling_hooks
from headrace_http_api.validation import AtLeast, Between, FieldError, make_converter
from headrace_scheduling.requests import MAX_CHOICES

__all__ = [
    "ACCEPTED_WITHOUT_EFFECT",
    "MAX_TOP_LOGPROBS",
    "GenerationFields",
    "PositiveInt",
    "StreamOptions",
    "make_request_converter",
]

MAX_STOP_STRINGS = 16
MAX_TOP_LOGPROBS = 20

# Known fields that never change an answer here, so that naming them as ignored would only be noise.
ACCEPTED_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

PositiveInt = Annotated[int, AtLeast(1)]
NumChoices = Annotated[int, Between(1, MAX_CHOICES)]
StopStrings = tuple[str, ...]
Priority = Literal["interactive", "batch"]


@frozen(kw_only=True)
class StreamOptions:
    """How to stream; `include_usage` adds one chunk with the usage before the end."""

    include_usage: bool = False


@frozen(kw_only=True)
class GenerationFields(SamplingFields, GrammarFields):
    """What every generation request may carry; None is "not given"."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: NumChoices = 1
    best_of: NumChoices | None = None
    max_tokens: PositiveInt | None = None
    # -1 is mlx-lm's way to ask for none.
    top_logprobs: Annotated[int, Between(-1, MAX_TOP_LOGPROBS)] | None = None
    stop: StopStrings = ()
    session_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    priority: Priority = "interactive"
    timeout_s: Annotated[float, Between(0.001, 86_400)] | None = None

    @property
    def cache_session_id(self) -> str | None:
        """What names the conversation to the prefix cache."""
        return self.prompt_cache_key if self.session_id is None else self.session_id

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def drops_reply(self) -> bool:
        """Whether only the prompt is wanted back."""
        return False

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Best candidates wanted for each token of the prompt; None for no log-probabilities of it."""
        return None

    @property
    def num_candidates(self) -> int:
        """Replies to generate for each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_top_logprobs(self) -> int | None:
        """Best candidates wanted for each token of the reply; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def thinks(self) -> bool | None:
        """Whether the reply begins with reasoning, if the request says so."""
        return None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """Refuse fields that contradict each other.

        Raises:
            InvalidRequest: names one of them.
        """
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest(
                f"best_of is {self.best_of}, and n is {self.n}; best_of must be at least n", param="best_of"
            )
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise InvalidRequest(
                "best_of is above n in a stream; which replies are the best is known only at their end: "
                "leave out best_of or stream",
                param="best_of",
            )
        limit = self.requested_max_tokens
        if limit is not None and self.min_tokens is not None and self.min_tokens > limit:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}; it must be at most max_tokens, {limit}", param="min_tokens"
            )
        _ = self.asked_grammar()

    def wanted_logprobs(self, asked: bool | None) -> int | None:
        """Return how many candidates per token are wanted, given a switch beside `top_logprobs`.

        Raises:
            InvalidRequest: they contradict each other.
        """
        num_top = None if self.top_logprobs == -1 else self.top_logprobs
        if asked is False and num_top:
            raise InvalidRequest(
                f"top_logprobs is {num_top}, and logprobs is false; set logprobs to true", param="top_logprobs"
            )
        return num_top or 0 if asked or num_top else None


def make_request_converter() -> Converter:
    """Make a strict converter that knows the shared fields' own forms."""
    converter = make_converter()
    register_sampling_hooks(converter)
    register_grammar_hooks(converter)
    converter.register_structure_hook_func(lambda kind: kind == StopStrings, _to_stop)
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
