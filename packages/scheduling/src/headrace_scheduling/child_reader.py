"""What a child sends, read to its end: on an event loop, or on the calling thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from headrace_scheduling.child import EngineChild
    from headrace_scheduling.ledger import PortLedger
    from headrace_scheduling.messages import EngineStatus

_LOOK_S = 1.0


class ChildReader:
    """Hands the events of one child to a ledger.

    Attributes:
        last: the last status that the child told; None if it told none.
    """

    def __init__(self, child: EngineChild, ledger: PortLedger) -> None:
        self._child = child
        self._ledger = ledger
        self._is_gone = threading.Event()
        self.last: EngineStatus | None = None

    def read_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read on a loop; return when the child is gone or the loop is closed. Called on another thread."""
        try:
            loop.call_soon_threadsafe(loop.add_reader, self._child.fileno(), self._read_ready, loop)
        except RuntimeError:
            return
        while not self._is_gone.wait(_LOOK_S):
            if loop.is_closed():
                return

    def read_here(self) -> None:
        """Read until the child is gone."""
        while not self._is_gone.is_set():
            if not self._read(block=True):
                self._is_gone.set()

    def _read_ready(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._read(block=False):
            # Before anybody is told: the descriptor is closed then.
            loop.remove_reader(self._child.fileno())
            self._is_gone.set()

    def _read(self, *, block: bool) -> bool:
        """Hand on what has arrived; whether the child is still there."""
        received = self._child.receive(block=block)
        if received is None:
            return False
        for events in received:
            self.last = events.status
            if events.status.state != "failed":
                self._ledger.deliver(events)
        return True
