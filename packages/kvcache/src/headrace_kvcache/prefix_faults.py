"""Logs what went wrong beside a prefix cache without saying what anybody wrote."""

from __future__ import annotations

import traceback
from logging import getLogger

_logger = getLogger("headrace_kvcache.prefix_cache")


def log_fault(what: str, error: BaseException) -> None:
    """Log a failure's type and place: its message could quote tokens."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].name}, line {frames[-1].lineno}" if frames else "nowhere"
    _logger.warning("%s (%s in %s)", what, type(error).__name__, where)
