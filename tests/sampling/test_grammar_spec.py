"""Specifications and their check: what is taken, what is refused and why, and that neither needs a model."""

import functools
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_sampling import (
    GrammarCompiler,
    GrammarFailed,
    GrammarSpec,
    GrammarTag,
    GrammarUnavailable,
    InvalidDrafts,
    InvalidGrammar,
    SamplingError,
    TokenNotAllowed,
    check_grammar,
)
from headrace_sampling.grammar import engine

DATA = json.loads(Path(__file__).with_name("grammar_schemas.json").read_text("utf-8"))
REMEDY = r"; [a-z].+$"


def test_there_are_sixty_schemas():
    """The table has at least sixty schemas, each under its own name."""
    names = [entry["name"] for entry in DATA["supported"]]

    assert len(names) == len(set(names)) >= 60


def parts_of(schema):
    """All schemas within a schema, itself first, that are no data."""
    yield schema
    if isinstance(schema, dict):
        for name, value in schema.items():
            if name in {"properties", "patternProperties", "$defs", "definitions"}:
                for part in value.values():
                    yield from parts_of(part)
            elif name in {"items", "additionalProperties"}:
                yield from parts_of(value)
            elif name in {"anyOf", "oneOf", "allOf", "prefixItems"}:
                for part in value:
                    yield from parts_of(part)


def takes_any(schema):
    """Whether some part of a value may be anything at all."""
    if not isinstance(schema, dict):
        return schema is True
    kind = schema.get("type")
    return (kind == "array" and "items" not in schema) or (kind == "object" and "additionalProperties" not in schema)


def refers_to_itself(schema):
    """Whether following references from some place leads back to it."""

    def targets(part):
        return {one["$ref"] for one in parts_of(part) if isinstance(one, dict) and isinstance(one.get("$ref"), str)}

    def target(reference):
        return functools.reduce(lambda part, step: part[step], reference.removeprefix("#").split("/")[1:], schema)

    def reached(start):
        found, waiting = set(), [start]
        while waiting:
            for one in targets(target(waiting.pop())) - found:
                found.add(one)
                waiting.append(one)
        return found

    return any(one in reached(one) for one in targets(schema))


@pytest.mark.parametrize(
    "entry", [one for one in DATA["supported"] if "unbounded" in one], ids=lambda entry: entry["name"]
)
def test_what_the_table_calls_unbounded_cannot_be_bounded(entry):
    """A schema whose replies need not end soon is recursive, or takes any value somewhere."""
    if entry["unbounded"] == "recursion":
        assert refers_to_itself(entry["schema"])
    else:
        assert entry["unbounded"] == "any value"
        assert any(map(takes_any, parts_of(entry["schema"])))


@pytest.mark.parametrize("entry", DATA["supported"], ids=lambda entry: entry["name"])
def test_schemas_in_use_are_taken(entry):
    """Each schema of the kinds that people use passes the check, as a mapping and as text."""
    check_grammar(GrammarSpec.json_schema(entry["schema"]))
    check_grammar(GrammarSpec.json_schema(json.dumps(entry["schema"]), compact=True))


@pytest.mark.parametrize("entry", DATA["unsupported"], ids=lambda entry: entry["name"])
def test_what_is_not_enforced_is_refused(entry):
    """A keyword that would not be enforced is an error that names the field, the reason and what to do."""
    with pytest.raises(InvalidGrammar, match=REMEDY) as caught:
        check_grammar(GrammarSpec.json_schema(entry["schema"]))

    assert caught.value.field == "json_schema"
    assert entry["reason"] in caught.value.reason
    assert len(caught.value.reason) <= 300


def test_the_number_of_properties_is_bounded():
    """Objects so large that compiling them would take minutes are refused at once; large ones are taken."""

    def wide(num_properties, name="k"):
        return {
            "type": "object",
            "properties": {f"{name}{number}": {"type": "null"} for number in range(num_properties)},
        }

    check_grammar(GrammarSpec.json_schema(wide(300)))
    for schema in (
        wide(1001),
        {"type": "object", "required": [str(number) for number in range(1001)]},
        {"anyOf": [wide(900, f"x{number}") for number in range(6)]},
    ):
        with pytest.raises(InvalidGrammar, match="properties; use at most"):
            check_grammar(GrammarSpec.json_schema(schema))


@pytest.mark.parametrize("key", [entry["name"] for entry in DATA["unsupported"]][:6])
def test_what_is_not_enforced_is_refused_deep_inside(key):
    """The refusal does not depend on where in the schema the keyword is, nor on a tag around it."""
    schema = next(entry["schema"] for entry in DATA["unsupported"] if entry["name"] == key)
    deep = {"type": "object", "properties": {"a": {"type": "array", "items": {"anyOf": [schema, {"type": "null"}]}}}}

    for spec in (
        GrammarSpec.json_schema(deep),
        GrammarSpec.structural_tag([GrammarTag(begin="<f>", content=GrammarSpec.json_schema(deep))]),
    ):
        with pytest.raises(InvalidGrammar, match="Unimplemented"):
            check_grammar(spec)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.json_object(),
        GrammarSpec.regex(r"[0-9]{3}-(a|b)/\w+"),
        GrammarSpec.choice(["yes", "no", 'a "quoted" \\ one', "née 🙂\n"]),
        GrammarSpec.lark('start: "a" ("," "a")* | json\njson: %json {"type": "integer"}'),
        GrammarSpec.lark("start: <unknown_here> /x/"),
        GrammarSpec.ebnf('root ::= item ("," item)*\nitem ::= [a-z]+ | "\\"" [0-9]{1,3} "\\""'),
        GrammarSpec.structural_tag([GrammarTag(begin="<f=a>", content=GrammarSpec.json_object(), end="</f>")]),
    ],
    ids=lambda spec: f"{spec.kind} {len(spec.text)}",
)
def test_other_kinds_are_taken(spec):
    """Every kind passes the check without a model, is picklable and is a key of a dictionary."""
    check_grammar(spec)

    assert pickle.loads(pickle.dumps(spec)) == spec
    assert len({spec, pickle.loads(pickle.dumps(spec))}) == 1


@pytest.mark.parametrize("entry", DATA["refused"], ids=lambda entry: f"{entry['kind']}: {entry['name']}")
def test_other_grammars_that_cannot_be_used_are_refused(entry):
    """What does not parse, is not supported or matches nothing is refused with the compiler's reason and a remedy."""
    with pytest.raises(InvalidGrammar, match=REMEDY) as caught:
        check_grammar(getattr(GrammarSpec, entry["kind"])(entry["text"]))

    assert caught.value.field == entry["kind"]
    assert entry["reason"] in caught.value.reason
    assert len(caught.value.reason) <= 300


DEEP = [
    lambda: GrammarSpec.regex("(" * 60_000),
    lambda: GrammarSpec.lark('start: "a" /(/'),
    lambda: GrammarSpec.lark("start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    lambda: GrammarSpec.ebnf("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
]


@pytest.mark.parametrize("make", DEEP, ids=["regex", "terminal", "lark", "ebnf"])
def test_deep_grammars_are_refused(make):
    """What is too deep to parse, or broken deep inside, is refused like anything else."""
    with pytest.raises(InvalidGrammar, match=REMEDY) as caught:
        check_grammar(make())

    assert len(caught.value.reason) <= 300


MALFORMED = [
    lambda: GrammarSpec.json_schema("no json"),
    lambda: GrammarSpec.json_schema("[1]"),
    lambda: GrammarSpec.json_schema('{"minimum": NaN}'),
    lambda: GrammarSpec.json_schema({"minimum": float("inf")}),
    lambda: GrammarSpec.json_schema({"a": object()}),
    lambda: GrammarSpec.json_schema("[" * 100_000),
    lambda: GrammarSpec.json_schema({"description": "x" * 300_000}),
    lambda: GrammarSpec.json_schema({"const": "\ud800"}),
    lambda: GrammarSpec.regex(""),
    lambda: GrammarSpec.regex(7),
    lambda: GrammarSpec.regex("a" * 70_000),
    lambda: GrammarSpec.choice([]),
    lambda: GrammarSpec.choice("yes"),
    lambda: GrammarSpec.choice(["a", ""]),
    lambda: GrammarSpec.json_object(free_until=""),
    lambda: GrammarSpec.json_object(free_until=[]),
    lambda: GrammarSpec.json_object(free_until=[True]),
    lambda: GrammarSpec.structural_tag([]),
    lambda: GrammarSpec.structural_tag([GrammarTag(begin="", content=GrammarSpec.regex("a"))]),
    lambda: GrammarSpec.structural_tag([GrammarTag(begin="<a>", content=GrammarSpec.lark('start: "a"'))]),
    lambda: GrammarSpec.structural_tag([GrammarTag(begin="<a>", content=GrammarSpec.regex("a"))], triggers=["<b"]),
    lambda: GrammarSpec.structural_tag(
        [GrammarTag(begin="<ab>", content=GrammarSpec.regex("a"))], triggers=["<a", "<ab"]
    ),
]


@pytest.mark.parametrize("make", MALFORMED, ids=map(str, range(len(MALFORMED))))
def test_malformed_specs_are_refused_at_once(make):
    """Form and size are checked when the specification is made, without the compiler."""
    with pytest.raises(InvalidGrammar, match=REMEDY):
        make()


@pytest.mark.parametrize("kind", ["references", "rules", "nested rules", "terminals"])
def test_long_chains_end_as_an_answer_and_not_as_a_crash(kind, tmp_path):
    """Chains as long as the size limits allow overflow no stack, also on a thread with a small one."""
    code = f"""
import json, threading
from headrace_sampling import GrammarSpec, check_grammar, InvalidGrammar
def chain(kind):
    if kind == "references":
        links = {{f"a{{i}}": {{"$ref": f"#/$defs/a{{i + 1}}"}} for i in range(7000)}}
        return GrammarSpec.json_schema({{"$ref": "#/$defs/a0", "$defs": {{**links, "a7000": {{"type": "null"}}}}}})
    forms = {{"rules": (4500, "r{{}}: r{{}}"), "nested rules": (1200, "r{{}}: " + "(" * 20 + "r{{}}" + ")" * 20),
             "terminals": (3000, 'R{{}}: "a" R{{}} "b"')}}
    count, form = forms[kind]
    name = "R" if kind == "terminals" else "r"
    lines = [form.format(i, i + 1) for i in range(count)]
    return GrammarSpec.lark("\\n".join([f"start: {{name}}0", *lines, f'{{name}}{{count}}: "c"']))
def run():
    try:
        check_grammar(chain({kind!r}))
        print("taken")
    except InvalidGrammar as error:
        print("refused")
threading.stack_size(2**19)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in {"taken", "refused"}


def test_without_the_extra(monkeypatch, facts):
    """Without llguidance a specification can be made; checking and compiling say what to install."""
    monkeypatch.setattr(engine, "find_spec", lambda _: None)
    spec = GrammarSpec.json_object()

    for use in (lambda: check_grammar(spec), lambda: GrammarCompiler(facts)):
        with pytest.raises(GrammarUnavailable, match=r'pip install "headrace-sampling\[grammar\]"'):
            use()


def test_specs_load_neither_llguidance_nor_mlx(tmp_path):
    """The serving process can make specifications, and import all modules, without loading llguidance, numpy or mlx."""
    code = """
import pkgutil, sys, importlib
import headrace_sampling
from headrace_sampling import GrammarSpec, GrammarTag
GrammarSpec.json_schema({"type": "object"})
heavy = {"llguidance", "numpy", "mlx", "mlx.core"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from headrace_sampling import check_grammar
check_grammar(GrammarSpec.regex("a"))
assert "mlx.core" not in sys.modules
sys.modules["llguidance"] = sys.modules["numpy"] = None
for name in [name for name in sys.modules if name.startswith("headrace_sampling")]:
    del sys.modules[name]
import headrace_sampling
for module in pkgutil.walk_packages(headrace_sampling.__path__, "headrace_sampling."):
    importlib.import_module(module.name)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "error",
    [
        InvalidGrammar("regex", "why", "what to do"),
        GrammarUnavailable(),
        GrammarFailed("why"),
        TokenNotAllowed(7, "why"),
        InvalidDrafts("tokens", 9, "fewer"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_picklable_and_of_one_family(error):
    """Errors cross process borders with their facts."""
    copy = pickle.loads(pickle.dumps(error))

    assert isinstance(error, SamplingError)
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
