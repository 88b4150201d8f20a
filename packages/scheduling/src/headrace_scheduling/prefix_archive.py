"""Stored prefixes that outlive the engine."""

from __future__ import annotations

from logging import getLogger
from typing import TYPE_CHECKING

from attrs import frozen

from headrace_scheduling.faults import log_fault

if TYPE_CHECKING:
    from headrace_kvcache import PrefixCache, PrefixFolder

_logger = getLogger(__name__)


@frozen
class PrefixArchive:
    """The entries of a prefix cache in a folder; a fault means fewer entries, never more (design D12).

    Attributes:
        cache: the engine's stored prefixes.
        folder: where they are between runs.
    """

    cache: PrefixCache
    folder: PrefixFolder

    def load(self) -> None:
        """Bring in what an earlier run has saved, on the engine's thread, before the first row."""
        try:
            report = self.folder.load(self.cache)
        except Exception as error:  # noqa: BLE001 - whatever lies in a folder, the engine starts
            log_fault(_logger, "stored prompts could not be loaded", error)
            return
        _logger.info(
            "%d stored prompts (%d bytes) loaded in %.1f s; %d without room, %d not usable",
            report.num_entries,
            report.num_bytes,
            report.duration_s,
            report.num_skipped,
            report.num_damaged,
        )

    def save(self) -> None:
        """Save what there is, on the engine's thread, after the last row."""
        try:
            report = self.folder.save(self.cache)
        except Exception as error:  # noqa: BLE001 - whatever the disk does, the engine ends in order
            log_fault(_logger, "stored prompts could not be saved", error)
            return
        _logger.info(
            "%d stored prompts saved in %.1f s, %d of them new; %d cannot be stored, %d failed",
            report.num_entries,
            report.duration_s,
            report.num_written,
            report.num_skipped,
            report.num_damaged,
        )
