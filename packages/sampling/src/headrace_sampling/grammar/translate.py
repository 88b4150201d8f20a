"""From a `GrammarSpec` to the text that llguidance compiles."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

from headrace_sampling.errors import InvalidGrammar
from headrace_sampling.grammar.schema_rules import check_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_sampling.grammar.spec import GrammarSpec, GrammarTag

# Bounded, because a model may repeat white space for ever.
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,32}"
_OPTIONS = "x-guidance"
_JSON_OPTIONS: Mapping[str, object] = {
    "item_separator": ",",
    "key_separator": ":",
    # Keywords that are not enforced are errors, and "exactly one of" is never weakened to "any of".
    "lenient": False,
    "coerce_one_of": False,
    # With one spelling per character, no key can be a known one in disguise. Neither \\u nor \\/.
    "json_allowed_escapes": '"\\\\bfnrt',
}


def to_llguidance(spec: GrammarSpec, special_ids: Mapping[str, int]) -> str:
    """Return the grammar in llguidance's own form.

    Args:
        spec: the grammar.
        special_ids: ids of special tokens by their text, for triggers that are such tokens.

    Raises:
        InvalidGrammar: EBNF that does not parse, or a schema that allows nothing.
    """
    from llguidance import LLMatcher

    if spec.kind == "text":
        return LLMatcher.grammar_from_regex("(.|\\n)*")
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "lark":
        return LLMatcher.grammar_from_lark(spec.text)
    if spec.kind == "ebnf":
        return _from_ebnf(spec.text)
    if spec.kind == "choice":
        return LLMatcher.grammar_from_lark(f"start: {_any_of(spec.choices)}\n")
    if spec.kind == "structural_tag":
        return LLMatcher.grammar_from_lark(_tags(spec, special_ids))
    return json.dumps({"grammars": [{"json_schema": _schema(spec)}]}, ensure_ascii=False)


def _from_ebnf(text: str) -> str:
    from llguidance import grammar_from

    try:
        return grammar_from("ebnf", text)
    except (ValueError, RecursionError) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)[:300]
        raise InvalidGrammar("ebnf", reason, "send a GBNF grammar whose first rule is root") from None


def _schema(spec: GrammarSpec) -> Mapping[str, object]:
    schema: object = {"type": "object"} if spec.kind == "json_object" else json.loads(spec.text)
    if schema is False:
        raise InvalidGrammar("json_schema", "the schema false allows nothing", "send a schema that some value meets")
    fields = {} if schema is True else cast("dict[str, object]", schema)
    if _OPTIONS in fields:
        raise InvalidGrammar("json_schema", f"{_OPTIONS} is no keyword of JSON Schema", "take it out")
    check_schema(fields)
    space = {"whitespace_flexible": False} if spec.compact else {"whitespace_pattern": _WHITE_SPACE}
    return {_OPTIONS: {**_JSON_OPTIONS, **space}, **fields}


def _tags(spec: GrammarSpec, special_ids: Mapping[str, int]) -> str:
    rules: list[str] = []
    calls: list[str] = []
    for place, trigger in enumerate(spec.triggers):
        tags = [tag for tag in spec.tags if _trigger_of(tag, spec.triggers) == trigger]
        bodies = " | ".join(_body(tag, trigger) for tag in tags)
        call = f"call_{place}"
        calls.append(call)
        token_id = special_ids.get(trigger)
        if not spec.allows_text:
            head = _quoted(trigger) if token_id is None else f"<[{token_id}]>"
            rules.append(f"{call}: {head} ({bodies})")
        elif token_id is None:
            rules += [f"{call}_head[lazy]: TEXT {_quoted(trigger)}", f"{call}: {call}_head ({bodies})"]
        else:
            rules.append(f"{call}: TEXT <[{token_id}]> ({bodies})")
    any_call = " | ".join(calls)
    if not spec.allows_text:
        more = "" if spec.between is None else f" ({_quoted(spec.between) if spec.between else ''} ({any_call}))*"
        return "\n".join([f"start: ({any_call}){more}", *rules, ""])
    start = f"start: ({any_call}){'+' if spec.is_required else '*'} TEXT"
    return "\n".join([start, "TEXT: /(.|\\n)*/", *rules, ""])


def _trigger_of(tag: GrammarTag, triggers: tuple[str, ...]) -> str:
    return next(text for text in triggers if tag.begin.startswith(text))


def _body(tag: GrammarTag, trigger: str) -> str:
    from llguidance import regex_to_lark

    begin = tag.begin[len(trigger) :]
    content = tag.content
    if content.kind == "regex":
        inner = f"/{regex_to_lark(content.text)}/"
    elif content.kind == "choice":
        inner = f"({_any_of(content.choices)})"
    else:
        inner = f"%json {json.dumps(_schema(content), ensure_ascii=False)}"
    return " ".join([_quoted(begin) if begin else "", inner, _quoted(tag.end) if tag.end else ""]).strip()


def _any_of(texts: tuple[str, ...]) -> str:
    return " | ".join(map(_quoted, texts))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
