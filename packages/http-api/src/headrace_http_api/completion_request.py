"""The body of `POST /v1/completions`."""

from typing import Any

from attrs import frozen
from cattrs import Converter

from headrace_http_api.generation_request import GenerationFields, make_request_converter
from headrace_http_api.json_body import shown
from headrace_http_api.validation import FieldError

__all__ = ["CompletionRequest", "make_completion_converter"]

Prompt = str | tuple[int, ...]


@frozen(kw_only=True)
class CompletionRequest(GenerationFields):
    """A validated completion request; the prompt is text, or token ids that are used as they are."""

    prompt: Prompt


def make_completion_converter() -> Converter:
    """Make the strict converter of completion requests."""
    converter = make_request_converter()
    converter.register_structure_hook_func(lambda kind: kind == Prompt, _to_prompt)
    return converter


def _to_prompt(value: Any, _kind: type) -> Prompt:
    if isinstance(value, list):
        return _from_list(value)
    if not isinstance(value, str):
        raise FieldError(f"is {shown(value)}; it must be a string, a list of one string, or a list of token ids")
    if not value:
        raise FieldError("is empty; it must hold at least one character")
    return value


def _from_list(entries: list[Any]) -> Prompt:
    if not entries:
        raise FieldError("is an empty list; it must hold one string, or token ids")
    if isinstance(entries[0], str | list):
        if len(entries) > 1:
            raise FieldError(f"is a list of {len(entries)} prompts; send one prompt per request")
        return _one(entries[0])
    return _to_ids(entries, "")


def _one(entry: str | list[Any]) -> Prompt:
    if not entry:
        raise FieldError("is empty; it must hold at least one character or token id", subpath="[0]")
    return entry if isinstance(entry, str) else _to_ids(entry, "[0]")


def _to_ids(entries: list[Any], path: str) -> tuple[int, ...]:
    for index, entry in enumerate(entries):
        if type(entry) is not int or entry < 0:
            raise FieldError(f"is {shown(entry)}; token ids are integers of at least 0", subpath=f"{path}[{index}]")
    return tuple(entries)
