"""JSON schemas of request bodies, from the classes that validate them, so that they cannot say anything else."""

from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import attrs

from headrace_http_api.audio.fields import GRANULARITIES, Granularities
from headrace_http_api.completion_request import MAX_PROMPTS, Logprobs, Prompts
from headrace_http_api.conversation_fields import TemplateKwargs
from headrace_http_api.curve_requests import DrawnCurve
from headrace_http_api.generation_request import (
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    Priority,
    StopStrings,
    StreamOptions,
)
from headrace_http_api.grammar_fields import Constraint
from headrace_http_api.messages import ROLES, Messages
from headrace_http_api.sampling_fields import MAX_BIAS, LogitBias
from headrace_http_api.token_requests import TokenIds
from headrace_http_api.tool_fields import ToolChoice, Tools
from headrace_http_api.validation import AtLeast, Between, OneOf
from headrace_sampling import HlgCurve, ToneCurve

__all__ = ["Schema", "request_schema"]

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_ID: Schema = {"type": "integer", "minimum": 0}
_IDS: Schema = {"type": "array", "minItems": 1, "items": _ID}
_PAIR: Schema = {
    "type": "array",
    "minItems": 2,
    "maxItems": 2,
    "items": {"type": "number", "minimum": 1e-4, "maximum": 100},
}
_PAIRS: Schema = {"type": "array", "minItems": 2, "items": _PAIR}
_BEGUN: Schema = {"anyOf": [_PAIRS, {"type": "array", "maxItems": 1}]}
_DRAWN: Schema = {"anyOf": [_BEGUN, {"type": "object", "required": ["points"], "properties": {"points": _BEGUN}}]}
_CURVE: Schema = {
    "anyOf": [_PAIRS, {"type": "object", "required": ["points"], "properties": {"points": _PAIRS}}],
}
_HLG: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "enabled": {"type": ["boolean", "null"]},
        "pivot": {"enum": ["top", "entropy", "median", None]},
        **{name: {"type": ["number", "null"]} for name in ("pivot_offset", "width", "shoulder", "toe", "gain")},
    },
}
_TOOL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": _TEXT | {"minLength": 1},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"]},
                "strict": {"type": ["boolean", "null"]},
            },
        },
    },
}
_TEXT_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _TEXT},
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": _TEXT_PART}, {"type": "null"}]},
        **{name: _or_null(_TEXT) for name in ("name", "tool_call_id", "reasoning_content", "reasoning")},
        "tool_calls": _or_null({"type": "array", "items": {"type": "object"}}),
    },
}
_SPECIAL: tuple[tuple[Any, Schema], ...] = (
    (bool, {"type": "boolean"}),
    (int, {"type": "integer"}),
    (float, {"type": "number"}),
    (str, _TEXT),
    (TemplateKwargs, {"type": "object"}),
    (Priority, {"type": "string", "enum": ["interactive", "batch"]}),
    (Messages, {"type": "array", "minItems": 1, "items": _MESSAGE}),
    (StreamOptions, {"type": "object", "properties": {"include_usage": {"type": ["boolean", "null"]}}}),
    (
        StopStrings,
        {
            "anyOf": [
                _TEXT | {"minLength": 1},
                {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": _TEXT | {"minLength": 1}},
            ]
        },
    ),
    (
        LogitBias,
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        },
    ),
    (
        Prompts,
        {
            "anyOf": [
                _TEXT | {"minLength": 1},
                _IDS,
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": MAX_PROMPTS,
                    "items": {"anyOf": [_TEXT | {"minLength": 1}, _IDS]},
                },
            ]
        },
    ),
    (Logprobs, {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}]}),
    (Tools, {"type": "array", "items": _TOOL}),
    (
        ToolChoice,
        {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {
                    "type": "object",
                    "required": ["function"],
                    "properties": {
                        "type": {"const": "function"},
                        "function": {"type": "object", "required": ["name"], "properties": {"name": _TEXT}},
                    },
                },
            ]
        },
    ),
    (HlgCurve, _HLG),
    (ToneCurve, _CURVE),
    (DrawnCurve, _DRAWN),
    (
        Granularities,
        {"anyOf": [{"enum": list(GRANULARITIES)}, {"type": "array", "items": {"enum": list(GRANULARITIES)}}]},
    ),
    (TokenIds, {"type": "array", "items": _ID}),
)


def request_schema(kind: type, known: Mapping[str, Schema] | None = None) -> Schema:
    """Build the JSON schema of a request class; null stands for absent in every field.

    Args:
        kind: the class.
        known: schemas of fields whose types do not tell theirs.
    """
    known = known or {}
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(kind)
    required = [one.name for one in fields if one.default is attrs.NOTHING]
    return {
        "type": "object",
        "required": required,
        "properties": {
            one.name: schema if one.name in required else _or_null(schema)
            for one in fields
            for schema in [known.get(one.name) or _schema(one.type)]
        },
    }


def _schema(kind: Any) -> Schema:
    for known, schema in _SPECIAL:
        if kind == known:
            return schema
    if isinstance(kind, type) and issubclass(kind, Constraint):
        return dict(kind.schema)
    if get_origin(kind) is Annotated:
        inner, *limits = get_args(kind)
        return _schema(inner) | _limits(limits)
    inner = [one for one in get_args(kind) if one is not NoneType]
    for known, schema in _SPECIAL:
        if set(inner) == set(get_args(known)):
            return schema
    return _schema(inner[0])


def _limits(limits: list[object]) -> Schema:
    schema: Schema = {}
    for limit in limits:
        match limit:
            case Between(low=low, high=high):
                schema |= {"minimum": low, "maximum": high}
            case AtLeast(low=low):
                schema |= {"minimum": low}
            case OneOf(choices=choices):
                schema |= {"enum": list(choices)}
            case _:
                raise TypeError(f"{limit!r} is a limit that the OpenAPI document cannot tell; teach it here")
    return schema
