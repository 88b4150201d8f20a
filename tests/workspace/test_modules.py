"""Rules on source and on every tracked file that no linter holds."""

import ast
import re
from pathlib import Path

import pytest

MAX_LINES = 500

# In pieces, because this file is tracked too.
INDEX_NAMES = re.compile("|".join(["py" + "pi", "python" + "hosted", r"/sim" + r"ple/(?=[\s\"'`)]|$)"]), re.IGNORECASE)
MACHINE_PATHS = re.compile(r"(?<![\w.:/~}*-])/(?:home|root|Users|work|private/var|mnt)/\w")


def sources(repository: Path) -> list[Path]:
    return [*repository.glob("packages/*/src/**/*.py"), *repository.glob("apps/*/src/**/*.py")]


def prints(source: str) -> list[int]:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


def is_command_line(path: Path) -> bool:
    return "apps" in path.parts and (path.stem in {"__main__", "cli", "console"} or "commands" in path.parts)


def test_modules_are_short(repository):
    """No module of a package or app has more than 500 lines."""
    lengths = {
        path.relative_to(repository).as_posix(): len(path.read_text().splitlines()) for path in sources(repository)
    }

    assert lengths
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_only_command_lines_print(repository):
    """`print` is called in the command line modules of the apps only; everything else logs, returns or raises."""
    offenders = [
        f"{path.relative_to(repository).as_posix()}:{line}"
        for path in sources(repository)
        if not is_command_line(path)
        for line in prints(path.read_text())
    ]

    assert offenders == []


def test_tests_mirror_packages(repository, member_folders):
    """Each member has its folder of tests, and no test folder is a package: base names repeat across folders."""
    for folder in member_folders:
        assert list((repository / "tests" / folder.name).glob("test_*.py")), folder.name
    assert list((repository / "tests").rglob("__init__.py")) == []


def test_tracked_files_name_no_index_and_no_machine(repository, tracked_files):
    """A user's own index settings hold: no tracked file but the lock names an index, none a path of one machine."""
    offenders = []
    for path in tracked_files:
        if path.name == "uv.lock":
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if INDEX_NAMES.search(line) or MACHINE_PATHS.search(line):
                offenders.append(f"{path.relative_to(repository).as_posix()}:{number}: {line.strip()[:80]}")

    assert offenders == []


@pytest.mark.parametrize(
    "line", ["cd " + "/home" + "/me/x", 'open("' + "/Users" + '/me/x")', "index-url = x/sim" + "ple/"]
)
def test_the_scan_sees_offenders(line):
    """The patterns of the scan find what they are for."""
    assert INDEX_NAMES.search(line) or MACHINE_PATHS.search(line)


@pytest.mark.parametrize(
    "line", ["http://127.0.0.1:8080/v1", "~/work/x", "https://example.org/home/page", "a simple/plain one"]
)
def test_the_scan_leaves_the_rest(line):
    """A URL's path, a path under a home and plain words are no offence."""
    assert not INDEX_NAMES.search(line)
    assert not MACHINE_PATHS.search(line)
