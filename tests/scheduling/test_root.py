"""Laws of the package root and its README."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headrace_scheduling
import headrace_scheduling.testing

_README = Path(__file__).parents[2] / "packages" / "scheduling" / "README.md"


@pytest.mark.parametrize("root", [headrace_scheduling, headrace_scheduling.testing])
def test_every_public_name_imports(root):
    """Law: each listed name exists, the list is sorted, and an unknown name is an AttributeError."""
    assert list(root.__all__) == sorted(root.__all__)
    assert dir(root) == root.__all__
    for name in root.__all__:
        assert getattr(importlib.import_module(root.__name__), name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = root.no_such_name


def test_everything_but_the_runner_works_without_mlx():
    """Law: the serving process's half, and the fakes, import no mlx."""
    names = [name for name in headrace_scheduling.__all__ if name != "MlxStepRunner"]
    program = (
        f"import sys, headrace_scheduling as root\nfor name in {names!r}: getattr(root, name)\n"
        "from headrace_scheduling.testing import FakeLoader, FakePort, FakeRunnerFactory\n"
        "import headrace_scheduling.engine_process\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'mlx'], 'mlx was imported'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_readme_s_example_runs():
    """Law: the first example of the README runs as it stands, with a fake in place of the model."""
    if not _README.is_file():
        pytest.skip("installed without the repository")
    example = re.search(r"```python\n(.*?)```", _README.read_text(), re.DOTALL).group(1)
    completed = subprocess.run([sys.executable, "-c", example], check=True, capture_output=True, text=True, timeout=60)
    assert completed.stdout.splitlines() == ["abcabcab length", "xyxyxyxy length"]
