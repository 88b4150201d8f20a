"""docs/api.md tells what the HTTP package serves, refuses, answers and counts."""

import json
import re

import attrs
import pytest

from headrace_http_api.chat_request import ChatRequest
from headrace_http_api.completion_request import CompletionRequest
from headrace_http_api.error_table import ERROR_RULES
from headrace_http_api.generation_request import ACCEPTED_WITHOUT_EFFECT
from headrace_http_api.observability import STATS
from headrace_http_api.unsupported import CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED


@pytest.fixture(scope="module")
def page(repository) -> str:
    return (repository / "docs" / "api.md").read_text()


def section(page: str, title: str) -> str:
    """The text below one heading, down to the next heading of any level."""
    return re.split(r"^#+ ", page.partition(f"# {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(text: str) -> set[str]:
    return set(re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE))


def accepted_line() -> str:
    return ", ".join(f"`{name}`" for name in sorted(ACCEPTED_WITHOUT_EFFECT)) + "."


def refused_rows() -> str:
    rows = []
    for name in sorted({*CHAT_UNSUPPORTED, *COMPLETION_UNSUPPORTED}):
        neutral = CHAT_UNSUPPORTED.get(name) or COMPLETION_UNSUPPORTED.get(name) or ()
        values = ", ".join(f"`{json.dumps(value)}`" for value in neutral)
        marks = ["refused" if name in table else "" for table in (CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED)]
        rows.append(f"| `{name}` | {values} | {' | '.join(marks)} |")
    return "\n".join(rows)


def stats_rows() -> str:
    return "\n".join(f"| `{stat.key}` | {stat.kind} | {f'`{stat.metric}`' if stat.metric else ''} |" for stat in STATS)


def test_served_fields_are_listed(page):
    """The tables of served fields hold exactly the fields of the two request classes."""
    chat = {one.name for one in attrs.fields(ChatRequest)}
    completion = {one.name for one in attrs.fields(CompletionRequest)}

    assert first_cells(section(page, "Served by both")) == chat & completion
    assert first_cells(section(page, "Served by chat")) == chat - completion
    assert first_cells(section(page, "Served by completions")) == completion - chat


def test_fields_without_effect_and_refused_fields_are_listed(page):
    """The page has the code's own tables; on failure, paste the expected rows."""
    assert accepted_line() in section(page, "Accepted without effect"), accepted_line()
    assert refused_rows() in section(page, "Refused"), refused_rows()


def test_every_error_of_the_table_is_listed(page):
    """Each status and code that an exception can become has a row with its type."""
    rows = [
        row.split(" | ") for row in re.findall(r"^\| (\d{3} \| .*) \|$", section(page, "Errors"), flags=re.MULTILINE)
    ]
    listed = {
        (int(status), kind.strip("`"), code)
        for status, kind, codes, _ in rows
        for code in re.findall(r"`(\w+)`", codes)
    }

    assert {(rule.status, rule.type, rule.code) for rule in ERROR_RULES.values()} - listed == set()


def test_every_code_in_the_source_is_listed(page, repository):
    """Each code that a route gives an error has a row too."""
    sources = (repository / "packages" / "http-api" / "src").rglob("*.py")
    codes = {code for path in sources for code in re.findall(r'\bcode="(\w+)"', path.read_text())}

    assert codes
    assert sorted(code for code in codes if f"`{code}`" not in section(page, "Errors")) == []


def test_stats_keys_are_listed(page):
    """The page lists every key of /stats with its metric; on failure, paste the expected rows."""
    assert stats_rows() in section(page, "Stats"), stats_rows()
