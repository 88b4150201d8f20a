"""From a `GrammarSpec` to the text that llguidance compiles."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, cast

from headrace_sampling.errors import InvalidGrammar
from headrace_sampling.grammar.number_rules import bound_numbers
from headrace_sampling.grammar.schema_rules import check_schema, objects_of
from headrace_sampling.grammar.spec import GrammarSpec
from headrace_sampling.grammar.text_rules import bound_texts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_sampling.grammar.spec import GrammarTag

# What people write, and no more: a model may repeat white space for as long as it is let.
_WHITE_SPACE = r"[\x20\x09]|(\x0D?\x0A){1,2}[\x20\x09]{0,24}"
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
# Comments, texts and regular expressions of Lark, so that what they hold is no keyword; and the keyword.
_LARK_PIECES = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|%json\s*(?=\{)')


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
        return LLMatcher.grammar_from_lark(_with_checked_schemas(spec.text))
    if spec.kind == "ebnf":
        return _from_ebnf(spec.text)
    if spec.kind == "choice":
        return LLMatcher.grammar_from_lark(f"start: {_any_of(spec.choices)}\n")
    if spec.kind == "structural_tag":
        return LLMatcher.grammar_from_lark(_tags(spec, special_ids))
    return json.dumps({"grammars": [{"json_schema": _schema_of(spec)}]}, ensure_ascii=False)


def _from_ebnf(text: str) -> str:
    from llguidance import grammar_from

    try:
        return grammar_from("ebnf", text)
    except (ValueError, RecursionError) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)[:300]
        raise InvalidGrammar("ebnf", reason, "send a GBNF grammar whose first rule is root") from None


def _with_checked_schemas(lark: str) -> str:
    """Return a Lark grammar in which every `%json` is held to what a schema alone is held to."""
    written: list[str] = []
    start = 0
    while (piece := _LARK_PIECES.search(lark, start)) is not None:
        end = piece.end()
        written.append(lark[start:end])
        if piece[0].startswith("%json"):
            try:
                schema, end = json.JSONDecoder().raw_decode(lark, end)
                written.append(json.dumps(_schema_of(GrammarSpec.json_schema(schema)), ensure_ascii=False))
            except InvalidGrammar as error:
                raise InvalidGrammar("lark", error.reason, error.remedy) from None
            except (ValueError, RecursionError):
                # The compiler says what is wrong with it.
                pass
        start = end
    return "".join([*written, lark[start:]])


def _schema_of(spec: GrammarSpec) -> Mapping[str, object]:
    """Return a schema with the compiler's options; its numbers are counted exactly, and its texts have an end."""
    schema: object = {"type": "object"} if spec.kind == "json_object" else json.loads(spec.text)
    if schema is False:
        raise InvalidGrammar("json_schema", "the schema false allows nothing", "send a schema that some value meets")
    fields = {} if schema is True else cast("dict[str, object]", schema)
    if _OPTIONS in fields:
        raise InvalidGrammar("json_schema", f"{_OPTIONS} is no keyword of JSON Schema", "take it out")
    check_schema(fields)
    bound_numbers(objects_of(fields))
    bound_texts(objects_of(fields))
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
        inner = f"%json {json.dumps(_schema_of(content), ensure_ascii=False)}"
    return " ".join([_quoted(begin) if begin else "", inner, _quoted(tag.end) if tag.end else ""]).strip()


def _any_of(texts: tuple[str, ...]) -> str:
    return " | ".join(map(_quoted, texts))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
