"""JSON schemas of answers. Tests hold every route's answers against them."""

from collections.abc import Mapping
from typing import Any

from headrace_http_api.observability import STATS

__all__ = ["COMPONENTS", "reference"]

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": ["string", "null"]}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_FLAG: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}


def reference(name: str) -> Schema:
    """Refer to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object with these properties and no others."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": {**required, **(optional or {})},
    }


_ERROR = _object({"error": _object({"message": _TEXT, "type": _TEXT, "param": _NAME, "code": _NAME})})

_CANDIDATE: dict[str, Schema] = {
    "id": _COUNT,
    "token": _TEXT,
    "logprob": _NUMBER,
    "bytes": _array({"type": "integer", "minimum": 0, "maximum": 255}),
}
_CHAT_LOGPROBS = _object(
    {
        "content": _array(_object(_CANDIDATE | {"top_logprobs": _array(_object(_CANDIDATE))})),
        "refusal": {"type": "null"},
    }
)
_COMPLETION_LOGPROBS = _object(
    {
        "tokens": _array(_TEXT),
        "token_logprobs": _array(_or_null(_NUMBER)),
        "top_logprobs": _array(_or_null({"type": "object", "additionalProperties": _NUMBER})),
        "text_offset": _array(_COUNT),
    }
)
_CALL = _object(
    {"id": _TEXT, "type": {"const": "function"}, "function": _object({"name": _TEXT, "arguments": _TEXT})},
)
_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _NAME, "refusal": {"type": "null"}},
    {"reasoning_content": _TEXT, "reasoning": _TEXT, "tool_calls": _array(_CALL)},
)
_COUNTS: dict[str, Schema] = {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT}
_USAGE = _object(_COUNTS | {"prompt_tokens_details": _object({"cached_tokens": _COUNT})})


def _answer(kind: str, choice: dict[str, Schema]) -> Schema:
    whole = {"index": _COUNT, **choice, "finish_reason": {"enum": ["stop", "length", "tool_calls"]}}
    return _object(
        {
            "id": _TEXT,
            "object": {"const": kind},
            "created": _COUNT,
            "model": _TEXT,
            "system_fingerprint": _NAME,
            "choices": _array(_object(whole | {"stop_reason": _NAME})),
            "usage": _USAGE,
        }
    )


_MODEL = _object(
    {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _TEXT,
        "context_window": _or_null(_COUNT),
        "capabilities": {"type": "object", "additionalProperties": _FLAG},
    }
)
_STATUS = {"enum": ["ready", "busy", "loading", "restarting", "draining", "failed", "stopped"]}
_TOKENS = _object(
    {
        "count": _COUNT,
        "max_model_len": _COUNT,
        "tokens": _array({"anyOf": [_COUNT, _object({"id": _COUNT, "piece": {"anyOf": [_TEXT, _array(_COUNT)]}})]}),
        "token_strs": _or_null(_array(_TEXT)),
    }
)
_TOKENIZER = _object(
    {
        "model": _TEXT,
        "model_max_length": _COUNT,
        "vocab_size": _COUNT,
        "bos_token": _NAME,
        "eos_token": _NAME,
        "pad_token": _NAME,
        "unk_token": _NAME,
        "chat_template": _NAME,
    }
)
_SIGNAL = _object(
    {
        "model": _TEXT,
        "num_prompt_tokens": _COUNT,
        "num_bins": _COUNT,
        "low": _NUMBER,
        "high": _NUMBER,
        "counts": _array(_COUNT),
        "masses": _array(_NUMBER),
        "below": _object({"count": _COUNT, "mass": _NUMBER}),
        "top": _array(_object(_CANDIDATE)),
    }
)
_SAMPLE = {"text": _TEXT, "junk": _FLAG, "seed": {"type": "integer"}, "finish_reason": {"enum": ["stop", "length"]}}
_SAMPLES = _object(
    {
        "model": _TEXT,
        "mode": {"enum": ["curve", "default"]},
        "recipe": _or_null(
            _object({"temperature": _NUMBER, "top_p": _NUMBER, "top_k": {"type": "integer"}, "min_p": _NUMBER})
        ),
        "n": _COUNT,
        "seed": {"type": "integer"},
        "samples": _array(_object(_SAMPLE)),
        "usage": _object(_COUNTS),
    }
)


def _stats() -> Schema:
    """Nest the registry's keys; `*` stands for each model's name."""
    root: Schema = _object({})
    for stat in STATS:
        place = root
        *groups, leaf = stat.key.split(".")
        for group in groups:
            if group == "*":
                place = place.setdefault("additionalProperties", _object({}))
                continue
            if group not in place["properties"]:
                place["required"].append(group)
                place["properties"][group] = {"type": "object"} if group == "models" else _object({})
            place = place["properties"][group]
        place["required"].append(leaf)
        place["properties"][leaf] = _TEXT if stat.kind == "info" else {"type": ["number", "null"]}
    return root


COMPONENTS: Mapping[str, Schema] = {
    "Error": _ERROR,
    "ChatCompletion": _answer("chat.completion", {"message": _MESSAGE, "logprobs": _or_null(_CHAT_LOGPROBS)}),
    "Completion": _answer("text_completion", {"text": _TEXT, "logprobs": _or_null(_COMPLETION_LOGPROBS)}),
    "Tokens": _TOKENS,
    "DetokenizedText": _object({"prompt": _TEXT, "content": _TEXT}),
    "RenderedPrompt": _object({"prompt": _TEXT}),
    "TokenizerInfo": _TOKENIZER,
    "Signal": _SIGNAL,
    "CurveSamples": _SAMPLES,
    "About": _object({"name": _TEXT, "version": _TEXT, "model": _NAME, "endpoints": _array(_TEXT)}),
    "Models": _object({"object": {"const": "list"}, "data": _array(reference("Model"))}),
    "Model": _MODEL,
    "Health": _object({"status": {"enum": ["ok", "degraded"]}, "engine": _STATUS, "detail": _TEXT}),
    "Readiness": _object({"ready": _FLAG, "status": _STATUS, "detail": _TEXT}),
    "Stats": _stats(),
    "Document": _OBJECT,
}
"""By the name that the document gives each; objects have no properties but the named ones."""
