"""Numbers under a schema are held to its bounds as they are written, also where floats get coarse."""

import json
import random

import pytest

from headrace_sampling import GrammarSpec, InvalidGrammar, check_grammar

EXACT = 2**53


def written(compiler, open_ids, schema, seed):
    """A number that chance writes under a schema, as an int where it is one."""
    row, chance, text = compiler.compile(GrammarSpec.json_schema(schema, compact=True)), random.Random(seed), ""
    while not row.only_ends:
        digits = sorted(one for one in open_ids(row) if one < 128)
        if row.is_satisfied and (not digits or len(text) > 30 or chance.random() < 0.1):
            break
        token_id = chance.choice(digits)
        row.accept(token_id)
        text += chr(token_id)
    return json.loads(text)


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        ({"minimum": EXACT + 1}, {"maximum": EXACT + 9}),
        ({"exclusiveMinimum": EXACT}, {"maximum": EXACT + 9}),
        ({"minimum": -EXACT - 9}, {"exclusiveMaximum": -EXACT}),
        ({"minimum": 2**60 + 1}, {"maximum": 2**60 + 2_000}),
        ({"exclusiveMinimum": 2**60}, {"exclusiveMaximum": 2**60 + 2_000}),
        ({"minimum": -(2**63)}, {"maximum": 2**63 - 1}),
        ({"minimum": 0}, {"maximum": 2**64 - 1}),
        ({"minimum": EXACT - 3}, {"maximum": EXACT + 3}),
        ({"exclusiveMinimum": EXACT - 1}, {"maximum": EXACT + 3}),
    ],
    ids=str,
)
def test_integers_keep_bounds_that_floats_would_round(compiler, open_ids, lower, upper):
    """Law: every integer that is written is within the bounds, to the last digit."""
    schema = {"type": "integer"} | lower | upper
    low = lower.get("minimum", lower.get("exclusiveMinimum", 0) + 1)
    high = upper.get("maximum", upper.get("exclusiveMaximum", 0) - 1)
    numbers = [written(compiler, open_ids, schema, seed) for seed in range(40)]
    assert all(isinstance(one, int) and low <= one <= high for one in numbers), numbers


@pytest.mark.parametrize("most", [1e300, 3.4028234663852886e38, 2**63, 10**400])
def test_numbers_may_have_the_bounds_of_their_type(compiler, open_ids, most):
    """Law: bounds that no reply would reach are taken, and held."""
    schema = {"type": "number", "minimum": -most, "maximum": most}
    assert all(abs(written(compiler, open_ids, schema, seed)) <= 10**19 for seed in range(10))


def test_bounds_in_lark_are_held_like_those_of_a_schema(compiler, write):
    """Law: what is refused in a schema is refused in one within Lark; text that looks like one is text."""
    for schema in ({"multipleOf": 2**31}, {"const": EXACT + 1}, {"x-guidance": {"lenient": True}}):
        with pytest.raises(InvalidGrammar) as caught:
            check_grammar(GrammarSpec.lark(f"start: %json {json.dumps({'type': 'integer'} | schema)}"))
        assert caught.value.field == "lark"
    row = compiler.compile(GrammarSpec.lark('start: "%json {}" x // %json {"multipleOf": 7}\nx: /[a-z]+%json {1,2}/'))
    write(row, "%json {}abc%json  ")
    assert row.is_satisfied


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
@pytest.mark.parametrize("keyword", ["multipleOf", "minimum", "const"])
def test_numbers_without_an_end_are_refused_in_lark(number, keyword):
    """Law: what is no finite number is refused where it stands, at once."""
    with pytest.raises(InvalidGrammar) as caught:
        check_grammar(GrammarSpec.lark(f'start: %json {{"{keyword}": {number}}}'))
    assert caught.value.field == "lark"


def test_white_space_in_lark_ends(compiler, write, open_ids):
    """Law: a schema in a Lark grammar has the white space of a schema alone: one space, or an indented line."""
    spec = GrammarSpec.lark('start: "=" %json {"type": "array", "items": {"type": "integer"}}')
    row = compiler.compile(spec)
    write(row, "=[ 1,\n        2")
    write(row, "\n]")
    assert row.is_satisfied
    row = compiler.compile(spec)
    write(row, "=[ ")
    assert ord(" ") not in open_ids(row)


@pytest.mark.parametrize("multiples", [[0.01, 5, 25], [65_536], [1_000_000], [60, 24, 7]])
def test_multiples_in_use_are_taken(multiples):
    """Law: what people ask for is not refused."""
    properties = {f"p{place}": {"type": "number", "multipleOf": one} for place, one in enumerate(multiples)}
    check_grammar(GrammarSpec.json_schema({"type": "object", "properties": properties}))
