"""Texts of a JSON schema that a model need never end."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Iterable

# A format allows any count of digits in each number, and a small model goes on with them. Nine hold a year in seconds.
_DURATION = "^([PT]|[0-9]{1,9}[YMWDHS])*$"


def bound_texts(entries: Iterable[dict[str, object]]) -> None:
    """Give an end to the numbers of durations, in place; what is allowed only gets less."""
    for entry in entries:
        if entry.get("format") == "duration":
            others = entry.get("allOf", [])
            # Anything else there is wrong, and the compiler's to refuse.
            if isinstance(others, list):
                entry["allOf"] = [*cast("list[object]", others), {"pattern": _DURATION}]
