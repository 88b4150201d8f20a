"""The documentation tells what the code does: generated parts are compared, links and commands are followed."""

import re
import subprocess
import sys

import pytest

from headrace_chat_server.settings import leaves

LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")


def settings_table() -> str:
    lines = ["| flag | variable | key | default | meaning |", "|---|---|---|---|---|"]
    for leaf in leaves():
        flags = ", ".join(f"`{flag}`" for flag in [leaf.flag, *(f"--{alias}" for alias in leaf.option.aliases)])
        default = "" if leaf.default in (None, ()) else f"`{str(leaf.default).lower()}`"
        lines.append(f"| {flags} | `{leaf.variable}` | `{leaf.key}` | {default} | {leaf.option.help} |")
    return "\n".join(lines)


def test_configuration_page_lists_every_setting(repository):
    """The table of docs/configuration.md is the settings tree; on failure, paste the expected table."""
    assert settings_table() in (repository / "docs" / "configuration.md").read_text(), settings_table()


def test_relative_links_lead_somewhere(repository, tracked_files):
    """Every relative link of a tracked Markdown file leads to a file; mkdocs only follows those inside docs/."""
    broken = [
        f"{path.relative_to(repository).as_posix()}: {target}"
        for path in tracked_files
        if path.suffix == ".md"
        for target in LINK.findall(path.read_text())
        if not (path.parent / target).exists()
    ]

    assert broken == []


def test_readme_needs_two_commands(repository):
    """The README starts with `pip install uv` and exactly two commands, and CI runs the one that tests."""
    readme = (repository / "README.md").read_text()
    start = readme.partition("## Start\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```console\n(.*?)```", start, flags=re.DOTALL)

    assert blocks == ["pip install uv\n", "uv run headrace\nuv run pytest\n"]
    assert re.search(r'^stage "[^"]+" uv run pytest$', (repository / ".ci" / "run").read_text(), flags=re.MULTILINE)
    assert "run: uv run pytest\n" in (repository / ".github" / "workflows" / "ci.yml").read_text()


@pytest.mark.parametrize("language", ["console", "python"])
def test_quick_start_has_one_example_of_each_kind(repository, language):
    """The README's Quick start holds exactly one curl and one Python example, which tests/integration runs."""
    quick_start = (repository / "README.md").read_text().partition("## Quick start\n")[2].partition("\n## ")[0]

    assert len(re.findall(rf"^```{language}$", quick_start, flags=re.MULTILINE)) == 1


def test_decisions_have_one_shape(repository):
    """Each decision page has context, decision and consequences, in this order, and is in the index."""
    folder = repository / "docs" / "decisions"
    index = (folder / "index.md").read_text()
    pages = sorted(folder.glob("d*.md"))

    assert pages
    for page in pages:
        assert re.findall(r"^## (.*)$", page.read_text(), flags=re.MULTILINE) == ["Context", "Decision", "Consequences"]
        assert f"({page.name})" in index


@pytest.mark.model
def test_python_example_runs_as_printed(repository, tmp_path):
    """The engine example of docs/getting-started.md prints a continuation of each of its two prompts."""
    page = (repository / "docs" / "getting-started.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)

    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if line.strip()]) >= 2
