"""The README's example runs as printed."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "packages" / "models" / "README.md"


def test_the_example_runs_as_printed(capsys):
    """A reader who pastes the example gets the starter model's facts."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    exec(compile(code, str(README), "exec"), {})
    assert re.fullmatch(r"llama 8192 \d+\n", capsys.readouterr().out)
