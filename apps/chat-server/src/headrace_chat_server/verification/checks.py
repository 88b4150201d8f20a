"""Checks as data: a name and a function; a check that raises has failed with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["Check", "CheckResult", "Measured", "run_checks"]


@frozen(kw_only=True)
class Measured:
    """What a check found.

    Attributes:
        deviation: how far two sides are apart, in the unit of the tolerance; NaN never passes.
        tolerance: the most that passes.
        detail: what else is worth knowing.
    """

    deviation: float
    tolerance: float
    detail: str = ""


@frozen(kw_only=True)
class Check:
    """A law to hold on this device."""

    name: str
    measure: Callable[[], Measured]


@frozen(kw_only=True)
class CheckResult:
    """How a check ended.

    Attributes:
        measured: None if the check raised.
        reason: of the failure; empty for a pass.
    """

    name: str
    passed: bool
    measured: Measured | None
    reason: str = ""


def run_checks(checks: Iterable[Check]) -> Iterator[CheckResult]:
    """Run checks one after the other; none ends the others."""
    for check in checks:
        yield run_check(check)


def run_check(check: Check) -> CheckResult:
    """Run one check; whatever it raises is a failure with its reason."""
    try:
        measured = check.measure()
    except Exception as error:  # noqa: BLE001 - a broken device raises anything, and the report must still be printed
        first_line = (str(error).splitlines() or [""])[0]
        return CheckResult(name=check.name, passed=False, measured=None, reason=f"{type(error).__name__}: {first_line}")
    passed = measured.deviation <= measured.tolerance
    reason = "" if passed else f"deviation {measured.deviation:.3g} is above {measured.tolerance:.3g}"
    return CheckResult(name=check.name, passed=passed, measured=measured, reason=reason)
