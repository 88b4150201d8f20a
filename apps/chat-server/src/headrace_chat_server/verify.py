"""The command `headrace doctor --verify`: laws on this device, and a report to paste."""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

from headrace_chat_server.console import say
from headrace_chat_server.errors import ModelUnavailable
from headrace_chat_server.models import find_model, require_backend
from headrace_chat_server.verification.checks import run_check, run_checks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace_chat_server.settings import Dtype
    from headrace_chat_server.verification.checks import CheckResult
    from headrace_models import BlasReport, LoadedModel

__all__ = ["run_verify", "show"]

_DISTRIBUTIONS = ("headrace-chat-server", "headrace-models", "headrace-kvcache", "headrace-sampling", "mlx")


def run_verify(model: str | None, *, dtype: Dtype) -> int:
    """Check this device and a model on it; 0 if every law holds, else 1.

    Raises:
        ModelUnavailable: the model cannot be found or loaded.
    """
    require_backend()
    source = find_model(model)
    from headrace_models import enable_fast_blas

    blas = enable_fast_blas()
    from headrace_chat_server.verification.laws import laws
    from headrace_models import ModelError, load

    start = time.perf_counter()
    try:
        loaded = load(source, dtype=dtype)
    except ModelError as error:
        raise ModelUnavailable(f"the model {source.name!r} cannot be verified: {error}") from error
    for name, value in _facts(blas, loaded):
        say(f"{name}: {value}")
    failed = show(run_checks(laws(loaded)))
    for result in _speed(loaded):
        say(result)
    say(f"verified in {time.perf_counter() - start:.0f} s: {f'{failed} FAILED' if failed else 'all laws hold'}")
    return 1 if failed else 0


def show(results: Iterable[CheckResult]) -> int:
    """Print one line for each result as it comes, and return how many failed."""
    failed = 0
    for result in results:
        failed += not result.passed
        measured = result.measured
        figures = "" if measured is None else f" ({measured.deviation:.2g} of {measured.tolerance:.2g} allowed)"
        detail = "" if measured is None or not measured.detail else f" {measured.detail}"
        reason = f": {result.reason}" if result.reason else ""
        say(f"{'pass' if result.passed else 'FAIL'}  {result.name}{figures}{detail}{reason}")
    return failed


def _facts(blas: BlasReport, loaded: LoadedModel) -> list[tuple[str, str]]:
    from headrace_models import profile

    device = profile()
    versions = ", ".join(f"{name} {version(name)}" for name in _DISTRIBUTIONS)
    return [
        ("versions", f"{versions}, Python {sys.version.split()[0]} on {sys.platform}"),
        ("device", f"{device.kind}: {device.name}, {device.memory_bytes / 1e9:.1f} GB, {device.num_cpus} processors"),
        ("BLAS", f"{blas.name}" if blas.loaded else f"MLX's own ({blas.reason})"),
        ("model", f"{loaded.source.name} as {loaded.representation}"),
    ]


def _speed(loaded: LoadedModel) -> list[str]:
    from headrace_chat_server.verification.checks import Check, Measured
    from headrace_chat_server.verification.served_model import measure_speed

    lines: list[str] = []

    def measure() -> Measured:
        lines.extend(f"{name}: {value}" for name, value in measure_speed(loaded))
        return Measured(deviation=0, tolerance=0)

    result = run_check(Check(name="speed", measure=measure))
    return lines if result.passed else [f"speed: not measured, {result.reason}"]
