"""docs/tool-calls.md tells the tables and its example runs."""

import re
from pathlib import Path

import pytest

from headrace_http_api.parsing.families import FAMILIES
from headrace_http_api.parsing.reasoning import REASONING_FORMATS


@pytest.fixture(scope="module")
def page():
    path = Path(__file__).parents[3] / "docs" / "tool-calls.md"
    if not path.exists():
        pytest.skip("the documentation is not here")
    return path.read_text()


def test_the_page_lists_every_family(page):
    """Names with their aliases, and reasoning formats."""
    for family in FAMILIES:
        aliases = ", ".join(f"`{alias}`" for alias in family.aliases)
        assert f"| `{family.name}` | {aliases + ' ' if aliases else ''}|" in page
    for entry in REASONING_FORMATS:
        assert f"`{entry.name}`" in page.partition("## Reasoning")[2]


def test_the_example_runs(page):
    """The page's library example parses its call."""
    names = {}
    exec(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0], names)

    assert names["reply"].content == "Let me see."
    assert names["reply"].tool_calls[0].arguments == '{"word": "race"}'
