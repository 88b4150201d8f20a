"""Import a package root and fail if that loads mlx or looks at the environment.

Run in a fresh interpreter, with nothing else on its path: `python -I scripts/import_probe.py headrace_kvcache`.
`--every-module` then imports each module of the package too, which proves that what it needs is declared.
"""

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator, MutableMapping
from unittest import mock


class WatchedEnvironment(MutableMapping[str, str]):
    """Stands in for `os.environ` and notes every use."""

    def __init__(self, values: MutableMapping[str, str]) -> None:
        self._values = values
        self.uses: list[str] = []

    def __getitem__(self, key: str) -> str:
        self.uses.append(f"read {key}")
        return self._values[key]

    def __setitem__(self, key: str, value: str) -> None:
        self.uses.append(f"write {key}")
        self._values[key] = value

    def __delitem__(self, key: str) -> None:
        self.uses.append(f"delete {key}")
        del self._values[key]

    def __iter__(self) -> Iterator[str]:
        self.uses.append("list all")
        return iter(self._values)

    def __len__(self) -> int:
        self.uses.append("count")
        return len(self._values)


def probe_root(package: str) -> list[str]:
    """Return what is wrong with importing the root of `package`; empty when it is light."""
    watched = WatchedEnvironment(os.environ)
    # os.getenv looks the mapping up in its module, so one replacement covers both ways to read.
    with mock.patch.object(os, "environ", watched):
        importlib.import_module(package)
    problems = [f"importing {package} touches the environment: {use}" for use in dict.fromkeys(watched.uses)]
    if loaded := sorted(name for name in sys.modules if name.split(".")[0] == "mlx"):
        problems.append(f"importing {package} loads {', '.join(loaded)}")
    return problems


def import_every_module(package: str) -> list[str]:
    """Import all modules below `package` but its `__main__`; return one line per module that fails."""
    problems: list[str] = []
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, f"{package}."):
        if module.name.endswith(".__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            problems.append(f"{module.name}: {error}")
    return problems


def main() -> int:
    """Probe the package named on the command line; the exit status is 1 when something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package")
    parser.add_argument("--every-module", action="store_true")
    arguments = parser.parse_args()
    problems = probe_root(arguments.package)
    if arguments.every_module:
        problems += import_every_module(arguments.package)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
