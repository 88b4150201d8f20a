"""The README's examples run as printed."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "packages" / "sampling" / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=[str(number) for number in range(len(BLOCKS))])
def test_the_example_runs(code, capsys):
    """Each comment that shows an output is the output; mlx-lm is no dependency, so its block may be skipped."""
    if "mlx_lm" in code:
        pytest.importorskip("mlx_lm")
    exec(compile(code, str(README), "exec"), {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*#  *(.*)", code)
