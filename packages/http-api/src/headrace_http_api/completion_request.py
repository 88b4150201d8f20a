"""The body of `POST /v1/completions`."""

from typing import Annotated, Any

from attrs import frozen
from cattrs import Converter

from headrace_http_api.errors import InvalidRequest
from headrace_http_api.generation_request import MAX_TOP_LOGPROBS, GenerationFields, make_request_converter
from headrace_http_api.json_body import shown
from headrace_http_api.validation import AtLeast, FieldError

__all__ = ["MAX_PROMPTS", "CompletionRequest", "Logprobs", "Prompts", "make_completion_converter"]

MAX_PROMPTS = 64

Prompt = str | tuple[int, ...]
Prompts = tuple[Prompt, ...]
Logprobs = bool | int


@frozen(kw_only=True)
class CompletionRequest(GenerationFields):
    """A validated completion request; a prompt is text, or token ids that are used as they are."""

    prompt: Prompts
    max_tokens: Annotated[int, AtLeast(0)] | None = None
    echo: bool = False
    logprobs: Logprobs | None = None

    @property
    def drops_reply(self) -> bool:
        return self.max_tokens == 0

    @property
    def num_top_logprobs(self) -> int | None:
        if self.logprobs is None or isinstance(self.logprobs, bool):
            return self.wanted_logprobs(self.logprobs)
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.num_top_logprobs if self.echo else None

    @property
    def longest_text(self) -> int:
        """Characters of the longest prompt that is text."""
        return max(len(prompt) if isinstance(prompt, str) else 0 for prompt in self.prompt)

    def check(self) -> None:
        """As the base's, with the fields of completions."""
        super().check()
        if self.drops_reply and not self.echo:
            raise InvalidRequest(
                "max_tokens is 0, which asks for nothing; it must be at least 1, or echo must be true",
                param="max_tokens",
            )
        is_number = self.logprobs is not None and not isinstance(self.logprobs, bool)
        if is_number and self.top_logprobs not in (None, -1, self.logprobs):
            raise InvalidRequest(
                f"top_logprobs is {self.top_logprobs}, and logprobs is {self.logprobs}; give one of them",
                param="top_logprobs",
            )
        _ = self.num_top_logprobs


def make_completion_converter() -> Converter:
    """Make the strict converter of completion requests."""
    converter = make_request_converter()
    converter.register_structure_hook_func(lambda kind: kind == Prompts, _to_prompts)
    converter.register_structure_hook_func(lambda kind: kind in (Logprobs, Logprobs | None), _to_logprobs)
    return converter


def _to_logprobs(value: Any, _kind: Any) -> Logprobs | None:
    if value is None or type(value) is bool:
        return value
    if type(value) is not int or not 0 <= value <= MAX_TOP_LOGPROBS:
        raise FieldError(
            f"is {shown(value)}; it must be the number of candidates per token, 0 to {MAX_TOP_LOGPROBS}, or a boolean"
        )
    return value


def _to_prompts(value: Any, _kind: type) -> Prompts:
    if isinstance(value, str):
        return (_text(value, ""),)
    if not isinstance(value, list):
        raise FieldError(
            f"is {shown(value)}; it must be a string, a list of strings, a list of token ids, or a list of such lists"
        )
    if not value:
        raise FieldError("is an empty list; it must hold strings, or token ids")
    if not isinstance(value[0], str | list):
        return (_to_ids(value, ""),)
    if len(value) > MAX_PROMPTS:
        raise FieldError(f"is a list of {len(value)} prompts; at most {MAX_PROMPTS} are served at once: send several")
    return tuple(_one(entry, f"[{index}]") for index, entry in enumerate(value))


def _one(entry: Any, path: str) -> Prompt:
    if isinstance(entry, str):
        return _text(entry, path)
    if not isinstance(entry, list) or not entry:
        raise FieldError(f"is {shown(entry)}; it must be a string or a list of token ids", subpath=path)
    return _to_ids(entry, path)


def _text(value: str, path: str) -> str:
    if not value:
        raise FieldError("is empty; it must hold at least one character", subpath=path)
    return value


def _to_ids(entries: list[Any], path: str) -> tuple[int, ...]:
    for index, entry in enumerate(entries):
        if type(entry) is not int or entry < 0:
            raise FieldError(f"is {shown(entry)}; token ids are integers of at least 0", subpath=f"{path}[{index}]")
    return tuple(entries)
