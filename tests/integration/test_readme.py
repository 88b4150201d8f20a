"""The README's examples run as printed, against a real server."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def example(language: str) -> str:
    quick_start = README.read_text(encoding="utf-8").partition("## Quick start\n")[2].partition("\n## ")[0]
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", quick_start, flags=re.MULTILINE | re.DOTALL)
    assert "http://127.0.0.1:8080" in block
    return block


@pytest.mark.parametrize(
    ("language", "command", "proof"),
    [
        ("console", ["bash", "-e", "-c"], r'"finish_reason": ?"(stop|length)"'),
        ("python", [sys.executable, "-c"], r"\w+"),
    ],
)
def test_quick_start_runs_as_printed(server, server_environment, language, command, proof):
    """A newcomer who pastes the example gets an answer; only the port differs here."""
    script = example(language).replace("http://127.0.0.1:8080", server.url)
    words = [*command, script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False, env=server_environment)
    assert done.returncode == 0, done.stderr
    assert re.search(proof, done.stdout), done.stdout
