"""The public names: one door per package, light to open, and no name comes or goes unseen."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = (
    "headrace_chat_server",
    "headrace_http_api",
    "headrace_kvcache",
    "headrace_models",
    "headrace_sampling",
    "headrace_scheduling",
    "headrace_transcription_server",
)
SNAPSHOT = Path(__file__).with_name("public_api.txt")


def public_names() -> list[str]:
    return [f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__]


def test_every_member_is_covered(projects):
    """The packages tested here are those of the workspace."""
    assert sorted(name.replace("-", "_") for name in projects) == list(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_sorted_and_importable(package):
    """`__all__` is in plain alphabetical order without repeats, `dir` shows it, and each name is there."""
    root = importlib.import_module(package)

    assert list(root.__all__) == sorted(set(root.__all__))
    assert set(root.__all__) <= set(dir(root))
    for name in root.__all__:
        assert getattr(root, name) is not None, f"{package}.{name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_an_unknown_name_is_an_attribute_error(package):
    """The lazy root answers for an unknown name as any module does, so `hasattr` and doctests work."""
    root = importlib.import_module(package)

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = root.no_such_name


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_root_is_light(package, repository, tmp_path):
    """In a fresh interpreter, importing a root loads no mlx and neither reads nor writes os.environ."""
    probe = repository / "scripts" / "import_probe.py"

    done = subprocess.run(
        [sys.executable, "-I", probe, package], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "deed", ["import mlx.core", "import os; os.getenv('HOME')", "import os; os.environ['A'] = 'b'"]
)
def test_the_probe_sees_a_heavy_root(deed, repository, tmp_path):
    """The probe that the law above rests on fails for a root that loads mlx, or reads or writes the environment."""
    (tmp_path / "heavy_root.py").write_text(deed)
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['probe', 'heavy_root']; "
    probe = repository / "scripts" / "import_probe.py"
    code = f"{start} import runpy; runpy.run_path({str(probe)!r}, run_name='__main__')"

    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "importing heavy_root" in done.stderr


def test_public_names_are_the_recorded_ones():
    """A name that comes or goes changes public_api.txt too, so that a reviewer sees it."""
    recorded = SNAPSHOT.read_text().split()
    actual = public_names()

    assert recorded == sorted(recorded)
    assert sorted(set(actual) - set(recorded)) == [], "new public names: add these lines to public_api.txt"
    assert sorted(set(recorded) - set(actual)) == [], "public names that are gone: announce, then take out"
