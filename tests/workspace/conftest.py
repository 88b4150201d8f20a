import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def member_folders(repository: Path) -> list[Path]:
    """The folders of all members, packages first."""
    return [
        file.parent
        for pattern in ("packages", "apps")
        for file in sorted(repository.glob(f"{pattern}/*/pyproject.toml"))
    ]


@pytest.fixture(scope="session")
def projects(member_folders: list[Path]) -> Mapping[str, Mapping[str, Any]]:
    """The `[project]` table of every member, by name."""
    tables = [tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in member_folders]
    return {table["name"]: table for table in tables}


@pytest.fixture(scope="session")
def tracked_files(repository: Path) -> list[Path]:
    """Every file that git tracks and that exists."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=repository, capture_output=True, check=True, text=True)
    files = [repository / name for name in listed.stdout.split("\0") if name]
    return [file for file in files if file.is_file()]
