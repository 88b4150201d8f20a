"""How much memory a model may take on this machine, and who says so."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from headrace_models.device import DeviceKind

__all__ = ["UsableMemory", "device_and_memory", "linux_memory", "usable_memory"]

_KIB = 1024
_CUDA_DISTRIBUTIONS = ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")
_NO_LIMIT = 1 << 60


@frozen(kw_only=True)
class UsableMemory:
    """Memory that may still be taken.

    Attributes:
        size_bytes: of it.
        origin: what set the limit, in words.
        advice: how the person at the machine can raise it; None if there is no way but more memory.
    """

    size_bytes: int
    origin: str
    advice: str | None = None


def device_and_memory() -> tuple[DeviceKind, int]:
    """Return the kind of MLX's default device and the machine's memory in bytes.

    Imports mlx only where that may be a GPU, so that a serving process on a CPU stays without it.
    """
    if sys.platform == "linux" and not any(_is_installed(name) for name in _CUDA_DISTRIBUTIONS):
        return "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    from headrace_models.device import profile

    found = profile()
    return found.kind, found.memory_bytes


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def usable_memory(kind: DeviceKind) -> UsableMemory:
    """Ask the system. Imports mlx where the device is a GPU.

    On a CPU, what Linux has available, or what the control group leaves if that is less; on Metal, the working set that
    the system recommends; on CUDA, what is free of the device's memory.
    """
    if kind == "cpu":
        return linux_memory(Path("/")) if sys.platform == "linux" else _whole_memory()
    import mlx.core as mx

    facts = mx.device_info(mx.default_device())
    if kind == "metal":
        return UsableMemory(
            size_bytes=int(facts["max_recommended_working_set_size"]),
            origin="the working set that macOS recommends for the GPU",
            advice=(
                "macOS lets the GPU keep more resident after `sudo sysctl iogpu.wired_limit_mb=N` (megabytes, until "
                "the next start; 0 is the system's own limit); leave at least 8 GB to everything else"
            ),
        )
    free = facts.get("free_memory") or facts.get("total_memory") or facts.get("memory_size") or 0
    return UsableMemory(size_bytes=int(free), origin="the memory of the CUDA device")


def linux_memory(root: Path) -> UsableMemory:
    """Read Linux's own figures below `root`: `proc/meminfo` and the control groups, versions 1 and 2."""
    available = _available_bytes(root / "proc/meminfo")
    limit = _group_bytes(root)
    if limit < available:
        return UsableMemory(
            size_bytes=limit, origin="the memory limit of the control group", advice="raise the container's limit"
        )
    return UsableMemory(size_bytes=available, origin="the memory that Linux has available", advice="end other programs")


def _available_bytes(meminfo: Path) -> int:
    for line in meminfo.read_text("ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * _KIB
    return 0


def _group_bytes(root: Path) -> int:
    """Return what the tightest control group above this process leaves; page cache that can be dropped is free."""
    left = _NO_LIMIT
    for folder, (limit, usage, cache) in _groups(root):
        most, used = _number(folder / limit), _number(folder / usage)
        if most is not None and used is not None and most < _NO_LIMIT:
            left = min(left, max(0, most - used + _statistic(folder / "memory.stat", cache)))
    return left


def _groups(root: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return []
    found: list[tuple[Path, tuple[str, str, str]]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup"
        names = ("memory.max", "memory.current", "inactive_file")
        if "memory" in controllers.split(","):
            base, names = base / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        elif controllers:
            continue
        folder = base / path.lstrip("/")
        above = [each for each in (folder, *folder.parents) if each.is_relative_to(base)]
        found += [(each, names) for each in above]
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text("ascii").splitlines()
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)


def _whole_memory() -> UsableMemory:
    from headrace_models.device import profile

    return UsableMemory(size_bytes=profile().memory_bytes, origin="the machine's memory")
