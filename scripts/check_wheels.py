"""Build every wheel, and prove that each package stands alone.

Per package: open the wheel; install it with its sibling wheels, by path, in a fresh environment outside the
repository; import its root, then every module, with nothing there but what it declares; add the test group and run
its own tests, from a folder where no source tree is importable.

    uv run python scripts/check_wheels.py                       build, then check all
    uv run python scripts/check_wheels.py --dist dist           check wheels that are already built
    uv run python scripts/check_wheels.py headrace-kvcache      check one package
"""

import argparse
import email
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parent.parent
PROBE = REPOSITORY / "scripts" / "import_probe.py"
DEVICE_EXTRAS = frozenset({"cuda12", "cuda13", "mkl"})
"""Extras that need a device or a large download; every other extra is installed before the tests run."""


class CheckFailed(Exception):
    """A package does not stand alone; the message says where."""


@frozen(kw_only=True)
class Member:
    """One member of the workspace, from its pyproject.toml."""

    folder: Path
    project: Mapping[str, Any] = field(repr=False)

    @property
    def name(self) -> str:
        return self.project["name"]

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def extras(self) -> Mapping[str, Sequence[str]]:
        return self.project.get("optional-dependencies", {})

    @property
    def tests(self) -> Path:
        return REPOSITORY / "tests" / self.folder.name

    def requirements(self) -> set[str]:
        """The declared requirements as the wheel's metadata should give them, in one spelling."""
        declared = {canonical(text) for text in self.project["dependencies"]}
        for extra, texts in self.extras.items():
            declared |= {canonical(text, extra=extra) for text in texts}
        return declared


def canonical(text: str, *, extra: str | None = None) -> str:
    """Spell a requirement in one way, whatever order, case and quotes it was written in."""
    requirement = Requirement(text)
    # The build backend sorts and nests the clauses of a marker anew; the projects join theirs with "and" only.
    clauses = str(requirement.marker).replace("(", "").replace(")", "").split(" and ") if requirement.marker else []
    if extra is not None:
        clauses.append(f'extra == "{extra}"')
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{canonicalize_name(requirement.name)}{extras}{requirement.specifier}; {' and '.join(sorted(clauses))}"


def read_members() -> list[Member]:
    """Read the members of the workspace, in the order of their names."""
    files = sorted([*REPOSITORY.glob("packages/*/pyproject.toml"), *REPOSITORY.glob("apps/*/pyproject.toml")])
    return [Member(folder=file.parent, project=tomllib.loads(file.read_text())["project"]) for file in files]


def run(command: Sequence[str | Path], *, cwd: Path, what: str) -> str:
    """Run a command without the surrounding Python settings; return its output, or raise CheckFailed with it."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise CheckFailed(f"{what} (exit status {done.returncode})\n{done.stdout}")
    return done.stdout


def build(dist: Path) -> None:
    """Build the source archive of every member, and its wheel from that archive."""
    run(["uv", "build", "--all-packages", "--no-sources", "--out-dir", dist], cwd=REPOSITORY, what="build")


def find_wheel(member: Member, dist: Path) -> Path:
    """Find the one wheel of a member."""
    wheels = sorted(dist.glob(f"{member.module}-*.whl"))
    if len(wheels) != 1:
        raise CheckFailed(f"{len(wheels)} wheels of {member.name} are in {dist}; exactly one must be there")
    return wheels[0]


def check_contents(member: Member, wheel: Path) -> None:
    """Open the wheel: typed, licensed, without tests, and requiring what the project declares."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata_name = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(metadata_name))
    dist_info = metadata_name.removesuffix("/METADATA")
    for needed in (f"{member.module}/py.typed", f"{dist_info}/licenses/LICENSE"):
        if needed not in names:
            raise CheckFailed(f"{wheel.name} lacks {needed}")
    if strangers := [name for name in names if not name.startswith((f"{member.module}/", f"{dist_info}/"))]:
        raise CheckFailed(f"{wheel.name} holds more than its package: {strangers}")
    if tests := [name for name in names if Path(name).name.startswith("test_") or "/tests/" in name]:
        raise CheckFailed(f"{wheel.name} holds tests: {tests}")
    built = {canonical(text) for text in metadata.get_all("Requires-Dist", [])}
    if built != member.requirements():
        raise CheckFailed(f"{wheel.name} requires {sorted(built)}; declared is {sorted(member.requirements())}")


def siblings(member: Member, members: Mapping[str, Member], *, extras: Iterable[str]) -> set[str]:
    """The names of all members that `member` with `extras` needs, directly or not."""
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(member.name, frozenset(extras))]
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        current = members[name]
        texts = [*current.project["dependencies"], *(text for extra in wanted for text in current.extras[extra])]
        requirements = [Requirement(text) for text in texts]
        waiting += [(one.name, frozenset(one.extras)) for one in requirements if one.name in members]
    return {name for name, _ in seen} - {member.name}


class Environment:
    """A fresh virtual environment outside the repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        run(["uv", "venv", "--quiet", "--python", sys.executable, folder / "venv"], cwd=folder, what="uv venv")
        self.python = folder / "venv" / "bin" / "python"

    def install(self, *arguments: str | Path, what: str) -> None:
        command = ["uv", "pip", "install", "--quiet", "--no-sources", "--python", self.python, *arguments]
        run(command, cwd=self.folder, what=what)

    def probe(self, module: str, *options: str, what: str) -> None:
        run([self.python, "-I", PROBE, module, *options], cwd=self.folder, what=what)

    def test(self, member: Member) -> None:
        """Run a copy of a member's tests, so that no source of the repository is in reach."""
        for file in ("pyproject.toml", "tests/conftest.py", member.folder.relative_to(REPOSITORY) / "README.md"):
            copy = self.folder / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / file, copy)
        copied = self.folder / "tests" / member.tests.name
        shutil.copytree(member.tests, copied, ignore=shutil.ignore_patterns("__pycache__"))
        configuration = self.folder / "pyproject.toml"
        command = [self.python, "-I", "-m", "pytest", "-q", "-c", configuration, "--rootdir", self.folder, copied]
        output = run(command, cwd=self.folder, what="tests")
        print(f"    {output.rstrip().splitlines()[-1]}")


def check(member: Member, members: Mapping[str, Member], dist: Path, scratch: Path, options: Sequence[str]) -> None:
    """Check one package; `options` go to every installation."""
    check_contents(member, find_wheel(member, dist))
    environment = Environment(scratch / member.name)

    def install(extras: set[str], what: str) -> None:
        needed = sorted(siblings(member, members, extras=extras))
        own = f"{find_wheel(member, dist)}[{','.join(sorted(extras))}]" if extras else find_wheel(member, dist)
        environment.install(own, *(find_wheel(members[name], dist) for name in needed), *options, what=what)

    backend = {"cpu"} & set(member.extras) if sys.platform == "linux" else set[str]()
    install(backend, "install alone")
    environment.probe(member.module, what="import of the root")
    install(backend | (set(member.extras) - DEVICE_EXTRAS - {"cpu"}), "install with its extras")
    environment.probe(member.module, "--every-module", what="import of every module")
    environment.install("--group", f"{REPOSITORY / 'pyproject.toml'}:test", *options, what="install of the test group")
    environment.test(member)


def write_constraints(file: Path) -> None:
    """Write the versions of the lock, so that a release elsewhere cannot fail this check."""
    command = ["uv", "export", "--quiet", "--frozen", "--all-groups", "--no-hashes", "--no-emit-workspace"]
    run([*command, "--no-annotate", "--no-header", "--output-file", file], cwd=REPOSITORY, what="uv export")


def check_all(selected: Sequence[str], dist: Path | None, *, newest: bool) -> list[str]:
    """Check the selected members, all by default; return the names of those that failed."""
    members = {member.name: member for member in read_members()}
    if unknown := sorted(set(selected) - set(members)):
        raise SystemExit(f"no such package: {', '.join(unknown)}; there are {', '.join(members)}")
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="headrace-wheels-") as name:
        scratch = Path(name)
        constraints = scratch / "constraints.txt"
        write_constraints(constraints)
        if dist is None:
            dist = scratch / "dist"
            build(dist)
        for member in members.values():
            if selected and member.name not in selected:
                continue
            started = time.monotonic()
            print(f"{member.name}", flush=True)
            try:
                check(member, members, dist, scratch, [] if newest else ["--constraint", str(constraints)])
            except CheckFailed as error:
                print(f"    FAILED: {error}")
                failed.append(member.name)
            print(f"    {time.monotonic() - started:.0f} s", flush=True)
    print(f"wheels: {len(selected or members) - len(failed)} passed, {len(failed)} failed")
    return failed


def main() -> int:
    """Run the check; the exit status is 1 when a package failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="only these; all by default")
    parser.add_argument("--dist", type=Path, help="folder of wheels that are already built")
    parser.add_argument("--newest", action="store_true", help="resolve as a user would today, not as the lock says")
    arguments = parser.parse_args()
    dist = arguments.dist.resolve() if arguments.dist else None
    try:
        failed = check_all(arguments.packages, dist, newest=arguments.newest)
    except CheckFailed as error:
        raise SystemExit(f"check_wheels: {error}") from error
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
