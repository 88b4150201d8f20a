"""Numbers of a JSON schema that the compiler, which counts in 64-bit floats, would get wrong or never be done with."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import TYPE_CHECKING, TypeGuard

from headrace_sampling.errors import InvalidGrammar
from headrace_sampling.grammar.schema_rules import leaves_of

if TYPE_CHECKING:
    from collections.abc import Iterable

# From here on not every integer is a float, and a step of one gets lost.
_EXACT = 2**53
# The compiler's ranges end at 64 bits with a sign; a little less is a float, too.
_FURTHEST = 9 * 10**18
_NEAREST_ZERO = 1e-15
# Compiling multiples takes time linear in this, and memory: half a second.
_MAX_MULTIPLE = 100_000
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def bound_numbers(entries: Iterable[dict[str, object]]) -> None:
    """Bring the bounds of schemas to numbers that are counted exactly, in place; what is allowed only gets less.

    Raises:
        InvalidGrammar: a bound, constant or multiple that no such number can stand for.
    """
    multiples: set[int] = set()
    for entry in entries:
        for name in (*_LOWER, *_UPPER):
            bound = entry.get(name)
            if _is_number(bound):
                entry[name] = _inward(name, bound)
        for name in ("const", "enum"):
            if any(
                _is_number(one) and isinstance(one, int) and abs(one) > _EXACT for one in leaves_of(entry.get(name))
            ):
                _refuse(f"{name} has an integer beyond 2^53, which is written rounded", "give it as a string")
        if _is_number(multiple := entry.get("multipleOf")) and multiple > 0:
            multiples.add(_digits_of(multiple))
    # Schemas that are met together are compiled to their common multiple.
    if max(sum(multiples), math.lcm(*multiples)) > _MAX_MULTIPLE:
        _refuse(
            f"the common multiple of its multipleOf is above {_MAX_MULTIPLE:,}",
            "use rounder or fewer multiples",
        )


def _inward(name: str, bound: float) -> int | float:
    is_lower = name in _LOWER
    if 0 < abs(bound) < _NEAREST_ZERO:
        _refuse(f"{name} {bound} is too near to zero", f"use 0, or at least {_NEAREST_ZERO}")
    if abs(bound) < _EXACT:
        return bound
    if abs(bound) > _FURTHEST:
        if is_lower == (bound > 0):
            _refuse(f"{name} leaves no number of 64 bits", f"use bounds within {_FURTHEST:.0e}")
        return -_FURTHEST if is_lower else _FURTHEST
    inside = float(bound)
    # An exclusive bound is compiled as if it were none.
    if (inside < bound if is_lower else inside > bound) or (inside == bound and name.startswith("exclusive")):
        inside = math.nextafter(inside, math.inf if is_lower else -math.inf)
    return int(inside)


def _digits_of(number: float) -> int:
    digits = int("".join(map(str, Decimal(str(number)).as_tuple().digits)))
    while digits % 10 == 0:
        digits //= 10
    return digits


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _refuse(reason: str, remedy: str) -> None:
    raise InvalidGrammar("json_schema", reason, remedy)
