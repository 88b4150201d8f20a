"""Texts that a schema would let go on for ever have an end."""

import pytest

from headrace_sampling import GrammarSpec, TokenNotAllowed

DURATION = {"type": "string", "format": "duration"}
SCHEMAS = {
    "alone": DURATION,
    "beside a pattern": DURATION | {"pattern": "^P"},
    "beside allOf": DURATION | {"allOf": [{"minLength": 3}]},
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
@pytest.mark.parametrize("text", ["P1Y2M3DT4H5M6S", "P3W", "PT999999999S", "P3DT1M"])
def test_durations_are_written_whole(compiler, write, open_ids, facts, schema, text):
    """What people write is allowed, beside other rules for the same text."""
    controller = compiler.compile(GrammarSpec.json_schema(schema))
    write(controller, f'"{text}"')
    assert open_ids(controller) == set(facts.eos_token_ids)


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_the_digits_of_a_duration_come_to_an_end(compiler, write, open_ids, schema):
    """After nine of them only a unit is open, so that a model which counts on must name one."""
    controller = compiler.compile(GrammarSpec.json_schema(schema))
    write(controller, '"PT123456789')
    assert open_ids(controller) == set(b"HMS")
    with pytest.raises(TokenNotAllowed):
        write(controller, "0")


def test_a_property_of_that_name_is_no_format(compiler, write):
    """Only the keyword counts."""
    schema = {"type": "object", "properties": {"format": {"const": "duration"}}, "required": ["format"]}
    controller = compiler.compile(GrammarSpec.json_schema(schema))
    write(controller, '{"format":"duration"')
