"""Rounds of speculation in one cache: begin, then keep everything or, row by row, a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace_kvcache.errors import IntegrityError, InvalidCountError, RoundRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def check_drafts(drafts: int) -> None:
    """Raise `InvalidCountError` unless a draft count is an integer of at least 0."""
    if type(drafts) is not int or drafts < 0:
        raise InvalidCountError(f"drafts is {drafts!r}; it must be an integer of at least 0")


class RoundBooks:
    """Which rows take part in the open round, and where they stood when it began."""

    __slots__ = ("_starts",)

    def __init__(self) -> None:
        self._starts: dict[int, int] | None = None

    @property
    def is_open(self) -> bool:
        """Whether a round is open."""
        return self._starts is not None

    @property
    def slots(self) -> tuple[int, ...]:
        """The rows of the open round; none if there is no round."""
        return tuple(self._starts or ())

    def begin(self, starts: dict[int, int]) -> None:
        """Open a round of rows that stand at `starts`."""
        if self._starts is not None:
            raise RoundRefusedError("a round is open; commit it or roll it back before another begins")
        self._starts = starts

    def close(self) -> None:
        """End the open round."""
        self.started()
        self._starts = None

    def forget(self, slot: int) -> None:
        """Take a row that leaves out of the round; the last one closes it."""
        if self._starts is not None and self._starts.pop(slot, None) is not None and not self._starts:
            self._starts = None

    def started(self) -> dict[int, int]:
        """Return where each row of the open round stood when it began."""
        if self._starts is None:
            raise RoundRefusedError("no round is open; call spec_round_begin() first")
        return self._starts

    def targets(self, keep: int | Sequence[int], ends: Mapping[int, int] | Sequence[int]) -> dict[int, int]:
        """Return the ends after a rollback that keeps `keep` of each row's positions appended in the round."""
        starts = self.started()
        keeps = keep if isinstance(keep, Sequence) else (keep,) * len(starts)
        if len(keeps) != len(starts):
            raise InvalidCountError(f"{len(keeps)} counts are given for {len(starts)} rows; there must be one per row")
        targets: dict[int, int] = {}
        for (slot, start), kept in zip(starts.items(), keeps, strict=True):
            if type(kept) is not int or not 0 <= kept <= ends[slot] - start:
                raise InvalidCountError(
                    f"row {slot} cannot keep {kept!r} positions; it must be an integer from 0 to {ends[slot] - start}"
                )
            targets[slot] = start + kept
        return targets

    def check_integrity(self, rows: Iterable[int]) -> None:
        """Raise `IntegrityError` unless every row of the round is among the given ones."""
        strangers = set(self.slots).difference(rows)
        if strangers:
            raise IntegrityError(f"rows {sorted(strangers)} are in a round, but not in the cache")
