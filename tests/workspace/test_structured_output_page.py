"""docs/structured-output.md tells what is refused, and how many schemas are checked."""

import json
import re

import pytest


@pytest.fixture(scope="module")
def page(repository) -> str:
    return (repository / "docs" / "structured-output.md").read_text("utf-8")


@pytest.fixture(scope="module")
def schemas(repository):
    return json.loads((repository / "tests" / "sampling" / "grammar_schemas.json").read_text("utf-8"))


def test_the_page_lists_what_is_refused(page, schemas):
    """The table has exactly the refusals that are tested, in their order."""
    table = page.partition("| what | `reason` says |\n|---|---|\n")[2].partition("\n\n")[0]

    assert re.findall(r"^\| (.+?) \|", table, re.MULTILINE) == [entry["name"] for entry in schemas["unsupported"]]


def test_the_page_lists_what_other_grammars_may_not_have(page, schemas):
    """The table of regular expressions and grammars has exactly the refusals that are tested, in their order."""
    table = page.partition("| kind | what | `reason` says |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+?) \|$", table, re.MULTILINE)

    assert rows == [(entry["kind"], entry["name"], entry["reason"]) for entry in schemas["refused"]]


def test_the_page_counts_the_schemas(page, schemas):
    """The number of schemas that the page gives is that of the table."""
    assert f"all replies of {len(schemas['supported'])} schemas" in page


def test_the_page_lists_the_formats(page, schemas):
    """Every format that a schema of the table has is in the page's list."""
    listed = set(re.findall(r"`([a-z0-9-]+)`", page.partition("Formats:")[2].partition(". Annotations")[0]))
    used = set(re.findall(r'"format": "([a-z0-9-]+)"', json.dumps(schemas["supported"])))

    assert listed == used
