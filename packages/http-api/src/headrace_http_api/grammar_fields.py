"""The fields that say what a reply must match, in the forms of OpenAI, vLLM and llama.cpp."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from attrs import fields, frozen
from cattrs import Converter

from headrace_http_api.errors import InvalidRequest
from headrace_http_api.json_body import path_step, shown
from headrace_http_api.validation import FieldError
from headrace_sampling import GrammarSpec, GrammarTag, InvalidGrammar

__all__ = ["AskedGrammar", "Constraint", "GrammarFields", "register_grammar_hooks"]

_Object = Mapping[str, Any]


@frozen
class AskedGrammar:
    """What a reply must match, and the field that says so."""

    param: str
    spec: GrammarSpec


@frozen
class Constraint:
    """The value of one field that constrains the reply; None asks for nothing.

    Attributes:
        schema: of the field's JSON.
    """

    spec: GrammarSpec | None
    schema: ClassVar[Mapping[str, Any]] = {}

    @staticmethod
    def read(value: Any) -> GrammarSpec | None:
        """Read the field's JSON.

        Raises:
            FieldError: with the path of what is wrong.
            InvalidGrammar: with the reason.
        """
        raise NotImplementedError


class JsonSchema(Constraint):
    """A JSON schema, as an object or as its text."""

    schema: ClassVar[Mapping[str, Any]] = {"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "boolean"}]}

    @staticmethod
    def read(value: Any) -> GrammarSpec:
        return _json_schema(value)


class Regex(Constraint):
    """A regular expression for the whole reply."""

    schema: ClassVar[Mapping[str, Any]] = {"type": "string", "minLength": 1}

    @staticmethod
    def read(value: Any) -> GrammarSpec:
        return GrammarSpec.regex(_text(value))


class Alternatives(Constraint):
    """The allowed replies."""

    schema: ClassVar[Mapping[str, Any]] = {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}}

    @staticmethod
    def read(value: Any) -> GrammarSpec:
        if not isinstance(value, list) or not value:
            raise FieldError(f"is {shown(value)}; it must be a list of at least one string")
        for index, entry in enumerate(value):
            if not isinstance(entry, str) or not entry:
                raise FieldError(f"is {shown(entry)}; it must be a string that is not empty", subpath=f"[{index}]")
        return GrammarSpec.choice(value)


class Grammar(Constraint):
    """A grammar: GBNF, told by its `::=`, or llguidance's dialect of Lark."""

    schema: ClassVar[Mapping[str, Any]] = {"type": "string", "minLength": 1}

    @staticmethod
    def read(value: Any) -> GrammarSpec | None:
        text = _text(value)
        return GrammarSpec.ebnf(text) if "::=" in text else GrammarSpec.lark(text)


class LlamaGrammar(Grammar):
    """As `Grammar`; the empty text asks for nothing, as clients of llama.cpp send it."""

    schema: ClassVar[Mapping[str, Any]] = {"type": "string"}

    @staticmethod
    def read(value: Any) -> GrammarSpec | None:
        return None if value == "" else Grammar.read(value)


class ResponseFormat(Constraint):
    """OpenAI's `response_format`, and vLLM's structural tags in it."""

    schema: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
            "json_schema": {"type": "object", "properties": {"name": {"type": "string"}, "schema": JsonSchema.schema}},
        },
    }

    @staticmethod
    def read(value: Any) -> GrammarSpec | None:
        given = _object(value)
        kind = given.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            return GrammarSpec.json_object() if given.get("schema") is None else _at("schema", given, _json_schema)
        if kind == "json_schema":
            return _from_json_schema(given)
        if kind == "structural_tag":
            return _structural_tag(given)
        raise FieldError(
            f"is {shown(kind)}; it must be text, json_object, json_schema or structural_tag", subpath=".type"
        )


class StructuredOutputs(Constraint):
    """vLLM's `structured_outputs`: one of its kinds."""

    schema: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {
            "json": JsonSchema.schema,
            "regex": Regex.schema,
            "choice": Alternatives.schema,
            "grammar": Grammar.schema,
            "json_object": {"type": "boolean"},
            "structural_tag": {"type": "object"},
            "disable_any_whitespace": {"type": "boolean"},
        },
    }

    @staticmethod
    def read(value: Any) -> GrammarSpec | None:
        given = {name: inner for name, inner in _object(value).items() if inner is not None}
        is_compact = given.pop("disable_any_whitespace", False)
        if type(is_compact) is not bool:
            raise FieldError(f"is {shown(is_compact)}; it must be true or false", subpath=".disable_any_whitespace")
        for name in given:
            if name not in _KINDS:
                raise FieldError(f"is not served; one of {', '.join(_KINDS)} is", subpath=path_step(name))
        wanted = [name for name in given if given[name] is not False or name != "json_object"]
        if len(wanted) > 1:
            raise FieldError(f"is given beside {wanted[0]}; give one of them", subpath=path_step(wanted[1]))
        if not wanted:
            return None
        spec = _at(wanted[0], given, _KINDS[wanted[0]])
        return _compact(spec) if is_compact else spec


# Without slots, so that a class can inherit from it beside another one.
@frozen(kw_only=True, slots=False)
class GrammarFields:
    """What a reply must match; at most one of them."""

    response_format: ResponseFormat | None = None
    guided_json: JsonSchema | None = None
    guided_regex: Regex | None = None
    guided_choice: Alternatives | None = None
    guided_grammar: Grammar | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: JsonSchema | None = None
    grammar: LlamaGrammar | None = None

    def asked_grammar(self) -> AskedGrammar | None:
        """Return what is asked for.

        Raises:
            InvalidRequest: by two fields.
        """
        asked: AskedGrammar | None = None
        for one in fields(GrammarFields):
            constraint: Constraint | None = getattr(self, one.name)
            if constraint is None or constraint.spec is None:
                continue
            if asked is not None:
                raise InvalidRequest(
                    f"{one.name} is given beside {asked.param}; a reply can match only one of them", param=one.name
                )
            asked = AskedGrammar(one.name, constraint.spec)
        return asked


def register_grammar_hooks(converter: Converter) -> None:
    """Teach a converter the constraints' own forms."""
    converter.register_structure_hook_func(_is_constraint, _to_constraint)


def _is_constraint(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Constraint)


def _to_constraint(value: Any, kind: type[Constraint]) -> Constraint:
    try:
        return kind(kind.read(value))
    except InvalidGrammar as error:
        raise FieldError(f"cannot be used: {error.reason}; {error.remedy}") from None


def _json_schema(value: Any) -> GrammarSpec:
    if not isinstance(value, dict | str | bool):
        raise FieldError(f"is {shown(value)}; it must be a JSON schema")
    return GrammarSpec.json_schema(value)


def _from_json_schema(given: _Object) -> GrammarSpec:
    # llama.cpp takes the schema without OpenAI's wrapping.
    if given.get("json_schema") is None and given.get("schema") is not None:
        return _at("schema", given, _json_schema)
    wrapped = _at("json_schema", given, _object)
    strict = wrapped.get("strict")
    if strict is not None and type(strict) is not bool:
        raise FieldError(f"is {shown(strict)}; it must be true or false", subpath=".json_schema.strict")
    if wrapped.get("schema") is None:
        return GrammarSpec.json_object()
    try:
        return _at("schema", wrapped, _json_schema)
    except FieldError as error:
        raise error.inside("json_schema") from None


def _structural_tag(value: Any) -> GrammarSpec:
    given = _object(value)
    entries = given.get("structures")
    if not isinstance(entries, list) or not entries:
        raise FieldError(f"is {shown(entries)}; it must be a list of at least one object", subpath=".structures")
    tags: list[GrammarTag] = []
    for index, entry in enumerate(entries):
        try:
            tags.append(_tag(entry))
        except FieldError as error:
            raise error.inside(index).inside("structures") from None
    triggers = given.get("triggers")
    if triggers is not None and not (isinstance(triggers, list) and all(isinstance(one, str) for one in triggers)):
        raise FieldError(f"is {shown(triggers)}; it must be a list of strings", subpath=".triggers")
    return GrammarSpec.structural_tag(tags, triggers=triggers or ())


def _tag(value: Any) -> GrammarTag:
    given = _object(value)
    begin, end = (_at(name, given, _text) for name in ("begin", "end"))
    return GrammarTag(begin=begin, content=_at("schema", given, _json_schema), end=end)


def _compact(spec: GrammarSpec) -> GrammarSpec:
    if spec.kind == "json_schema":
        return GrammarSpec.json_schema(spec.text, compact=True)
    return GrammarSpec.json_object(compact=True) if spec.kind == "json_object" else spec


def _flag_object(value: Any) -> GrammarSpec:
    if value is not True:
        raise FieldError(f"is {shown(value)}; it must be true or false")
    return GrammarSpec.json_object()


def _at(name: str, given: _Object, read: Callable[[Any], Any]) -> Any:
    try:
        return read(given.get(name))
    except FieldError as error:
        raise error.inside(name) from None


def _object(value: Any) -> _Object:
    if not isinstance(value, dict):
        raise FieldError(f"is {shown(value)}; it must be an object")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise FieldError(f"is {shown(value)}; it must be a string")
    return value


_KINDS: Mapping[str, Callable[[Any], GrammarSpec | None]] = {
    "json": _json_schema,
    "regex": Regex.read,
    "choice": Alternatives.read,
    "grammar": Grammar.read,
    "json_object": _flag_object,
    "structural_tag": _structural_tag,
}
