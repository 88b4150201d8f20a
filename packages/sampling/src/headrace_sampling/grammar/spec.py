"""What a reply must match, as plain data: frozen, picklable, hashable, read by whatever compiles it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal, NoReturn

from attrs import evolve, frozen

from headrace_sampling.errors import InvalidGrammar

GrammarKind = Literal["text", "json_schema", "json_object", "regex", "choice", "lark", "ebnf", "structural_tag"]
Schema = Mapping[str, object] | str | bool

MAX_SCHEMA_CHARS = 262_144
MAX_GRAMMAR_CHARS = 65_536
"""Longest regular expression, Lark or EBNF grammar. The parser recurses, so length bounds its stack."""
_MAX_FREE_UNTIL = 256


@frozen(kw_only=True)
class GrammarTag:
    """A constrained part within free text, for example one tool's call.

    Attributes:
        begin: text that starts it, from its trigger on.
        content: what is between begin and end; of kind json_schema, json_object, regex or choice.
        end: text that ends it; may be empty.
    """

    begin: str
    content: GrammarSpec
    end: str = ""


@frozen(kw_only=True)
class GrammarSpec:
    """A grammar of one reply. Made by the class methods, which check form and size; `check_grammar` checks the rest.

    Attributes:
        kind: which language `text` is in.
        text: a JSON schema as JSON text, a regular expression, or a grammar.
        choices: the allowed replies, for kind choice.
        tags: the constrained parts, for kind structural_tag.
        triggers: texts that must lead into a tag once they appear, for kind structural_tag.
        is_required: whether at least one tag must appear, for kind structural_tag.
        allows_text: whether there may be free text around the tags, for kind structural_tag.
        between: text between two tags without free text; None allows one tag only.
        compact: whether JSON has no white space between its tokens; else one space or tab, or one or two ends of line
            and up to 24 characters of indentation, at each place.
        free_until: text or token ids that end a free part, for example reasoning; the grammar holds from the next
            token on, and EOS is closed before it. None starts with the grammar.
        free_limit: most tokens of the free part before its end; then only what writes the end is open. None for no
            limit.
    """

    kind: GrammarKind
    text: str = ""
    choices: tuple[str, ...] = ()
    tags: tuple[GrammarTag, ...] = ()
    triggers: tuple[str, ...] = ()
    is_required: bool = False
    allows_text: bool = True
    between: str | None = None
    compact: bool = False
    free_until: str | tuple[int, ...] | None = None
    free_limit: int | None = None

    @classmethod
    def any_text(cls, *, free_until: str | Sequence[int], free_limit: int) -> GrammarSpec:
        """Match any reply whose free part has at most so many tokens.

        Raises:
            InvalidGrammar: the marker is no text and no token ids, or the limit is no integer from 0.
        """
        return cls(kind="text", free_until=_free_until(free_until)).limited(free_limit)

    def limited(self, free_limit: int) -> GrammarSpec:
        """Return the same grammar with a limit on its free part.

        Raises:
            InvalidGrammar: there is no free part, or the limit is no integer from 0.
        """
        if self.free_until is None:
            _refuse("free_limit", "there is no free part", "give free_until")
        if type(free_limit) is not int or free_limit < 0:
            _refuse("free_limit", f"it is {free_limit!r}", "give an integer of at least 0")
        return evolve(self, free_limit=free_limit)

    @classmethod
    def json_schema(
        cls, schema: Schema, *, compact: bool = False, free_until: str | Sequence[int] | None = None
    ) -> GrammarSpec:
        """Match JSON values that are valid under a schema, with the properties in the schema's order.

        Args:
            schema: the schema, or its JSON text.
            compact: allow no white space between tokens.
            free_until: see the class.

        Raises:
            InvalidGrammar: it is no JSON object or boolean, or is too long.
        """
        text = _schema_text(schema)
        return cls(kind="json_schema", text=text, compact=compact, free_until=_free_until(free_until))

    @classmethod
    def json_object(cls, *, compact: bool = False, free_until: str | Sequence[int] | None = None) -> GrammarSpec:
        """Match any JSON object."""
        return cls(kind="json_object", compact=compact, free_until=_free_until(free_until))

    @classmethod
    def regex(cls, pattern: str, *, free_until: str | Sequence[int] | None = None) -> GrammarSpec:
        """Match a regular expression from start to end, in the syntax of Rust's regex crate.

        Raises:
            InvalidGrammar: it is no text, or is empty or too long.
        """
        return cls(kind="regex", text=_text("regex", pattern), free_until=_free_until(free_until))

    @classmethod
    def choice(cls, choices: Sequence[str], *, free_until: str | Sequence[int] | None = None) -> GrammarSpec:
        """Match one of the given texts.

        Raises:
            InvalidGrammar: there is none, one is empty or no text, or they are too long together.
        """
        if isinstance(choices, str) or not choices:
            _refuse("choice", "it needs a list of at least one text", "give the allowed replies")
        for entry in choices:
            _text("choice", entry)
        _text("choice", "".join(choices), MAX_SCHEMA_CHARS)
        return cls(kind="choice", choices=tuple(choices), free_until=_free_until(free_until))

    @classmethod
    def lark(cls, grammar: str, *, free_until: str | Sequence[int] | None = None) -> GrammarSpec:
        """Match a Lark grammar in llguidance's dialect, from its rule `start`.

        Raises:
            InvalidGrammar: it is no text, or is empty or too long.
        """
        return cls(kind="lark", text=_text("lark", grammar), free_until=_free_until(free_until))

    @classmethod
    def ebnf(cls, grammar: str, *, free_until: str | Sequence[int] | None = None) -> GrammarSpec:
        """Match a GBNF grammar, llama.cpp's form of EBNF, from its rule `root`.

        Raises:
            InvalidGrammar: it is no text, or is empty or too long.
        """
        return cls(kind="ebnf", text=_text("ebnf", grammar), free_until=_free_until(free_until))

    @classmethod
    def structural_tag(
        cls,
        tags: Sequence[GrammarTag],
        *,
        triggers: Sequence[str] = (),
        is_required: bool = False,
        allows_text: bool = True,
        between: str | None = None,
        free_until: str | Sequence[int] | None = None,
    ) -> GrammarSpec:
        """Match free text in which each trigger leads into a tag that starts with it.

        Args:
            tags: the constrained parts.
            triggers: texts that open a tag; without any, each tag's whole beginning does.
            is_required: at least one tag must appear.
            allows_text: without it the reply is one tag, and what `between` allows.
            between: without free text, the text between tags, if there may be several; may be empty.
            free_until: see the class.

        Raises:
            InvalidGrammar: a tag has no beginning or a content of another kind, or starts with no trigger; a trigger
                starts no tag, or starts another trigger.
        """
        if not tags:
            _refuse("structural_tag", "it has no tags", "give at least one tag")
        openings = tuple(dict.fromkeys(triggers or [tag.begin for tag in tags]))
        _check_tags(tags, openings)
        return cls(
            kind="structural_tag",
            tags=tuple(tags),
            triggers=openings,
            is_required=is_required or not allows_text,
            allows_text=allows_text,
            between=between,
            free_until=_free_until(free_until),
        )


_TAG_CONTENTS = ("json_schema", "json_object", "regex", "choice")


def _check_tags(tags: Sequence[GrammarTag], triggers: Sequence[str]) -> None:
    for text in triggers:
        _text("structural_tag", text)
        if any(other != text and other.startswith(text) for other in triggers):
            _refuse("structural_tag", f"the trigger {text!r} starts another trigger", "keep the shorter one alone")
        if not any(tag.begin.startswith(text) for tag in tags):
            _refuse("structural_tag", f"the trigger {text!r} starts no tag", "take it out or add its tag")
    for tag in tags:
        _text("structural_tag", tag.begin)
        if not any(tag.begin.startswith(text) for text in triggers):
            _refuse("structural_tag", f"the tag {tag.begin!r} starts with no trigger", "add its trigger")
        if tag.content.kind not in _TAG_CONTENTS or tag.content.free_until is not None:
            _refuse("structural_tag", f"a tag's content is of kind {tag.content.kind}", f"use {_TAG_CONTENTS}")


def _schema_text(schema: Schema) -> str:
    if isinstance(schema, str):
        text = _text("json_schema", schema, MAX_SCHEMA_CHARS)
        try:
            parsed: object = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            _refuse("json_schema", f"it is no JSON ({_shown_error(error)})", "send the schema as JSON")
    else:
        parsed = dict(schema) if isinstance(schema, Mapping) else schema
    if not isinstance(parsed, (dict, bool)):
        _refuse("json_schema", "it is neither an object nor a boolean", "send a JSON schema")
    try:
        # Key order is kept: it is the order in which properties are generated.
        written = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        _refuse("json_schema", f"it is no JSON ({_shown_error(error)})", "send the schema as JSON")
    return _text("json_schema", written, MAX_SCHEMA_CHARS)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _shown_error(error: Exception) -> str:
    return "too deeply nested" if isinstance(error, RecursionError) else str(error)[:120]


def _text(name: str, value: object, longest: int = MAX_GRAMMAR_CHARS) -> str:
    if not isinstance(value, str) or not value:
        _refuse(name, "it is empty or no text", "give a text")
    if len(value) > longest:
        _refuse(name, f"it has {len(value)} characters", f"use at most {longest}")
    try:
        value.encode()
    except UnicodeEncodeError:
        _refuse(name, "it has half a surrogate pair", "send valid Unicode")
    return value


def _free_until(value: str | Sequence[int] | None) -> str | tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return _text("free_until", value, _MAX_FREE_UNTIL)
    ids = tuple(value)
    if not 0 < len(ids) <= _MAX_FREE_UNTIL or any(type(one) is not int or one < 0 for one in ids):
        _refuse("free_until", "it is no list of token ids", f"give a text, or 1 to {_MAX_FREE_UNTIL} token ids")
    return ids


def _refuse(field: str, reason: str, remedy: str) -> NoReturn:
    raise InvalidGrammar(field, reason, remedy)
