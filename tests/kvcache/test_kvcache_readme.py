"""The README's example runs as printed."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "packages" / "kvcache" / "README.md"


def test_the_example_runs(capsys):
    """Each comment that shows an output is the output."""
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, str(README), "exec"), {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*#  *(.*)", code)
