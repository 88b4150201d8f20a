"""Logging of caught errors without keeping them."""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logging import Logger


def log_fault(logger: Logger, what: str, error: BaseException, *, level: int = logging.ERROR) -> None:
    """Log an error with its traceback as text: a kept traceback keeps frames, and with them caches, alive."""
    logger.log(level, "%s\n%s", what, "".join(traceback.format_exception(error)).rstrip())


def summarize(error: BaseException) -> str:
    """Return an error's type and message in one line."""
    return f"{type(error).__name__}: {error}"
