"""SIGINT and SIGTERM as events of the running loop."""

import asyncio
import signal
from collections.abc import Generator
from contextlib import contextmanager

from attrs import Factory, define

__all__ = ["StopSignals", "stop_signals"]

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


@define
class StopSignals:
    """The first signal asks for an orderly end, the second for one at once."""

    first: asyncio.Event = Factory(asyncio.Event)
    second: asyncio.Event = Factory(asyncio.Event)

    def take(self) -> None:
        """Count one signal."""
        (self.second if self.first.is_set() else self.first).set()


@contextmanager
def stop_signals() -> Generator[StopSignals, None, None]:
    """Own the signals inside the block, so that none ends the process without its clean-up."""
    loop = asyncio.get_running_loop()
    signals = StopSignals()
    for number in _NUMBERS:
        loop.add_signal_handler(number, signals.take)
    try:
        yield signals
    finally:
        for number in _NUMBERS:
            loop.remove_signal_handler(number)
