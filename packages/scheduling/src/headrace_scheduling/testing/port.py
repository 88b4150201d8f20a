"""An engine port that a test drives by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_scheduling.events import Cancelled
from headrace_scheduling.ledger import PortLedger
from headrace_scheduling.messages import EngineInfo, EngineMessage, EngineStatus, StepEvents
from headrace_scheduling.testing.text import EOS_TOKEN_ID, VOCAB_SIZE

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


def fake_info(*, max_context: int = 4096, max_rows: int = 4) -> EngineInfo:
    """Make the facts of an engine that does not exist."""
    return EngineInfo(
        vocab_size=VOCAB_SIZE,
        max_context=max_context,
        max_rows=max_rows,
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
        weights_bytes=0,
        device="none",
        representation="none",
        identity="fake",
        pid=0,
        serial_reasons=("max-rows-is-1",) if max_rows == 1 else (),
    )


class FakePort:
    """Records what is sent; the test publishes what the engine would.

    Attributes:
        sent: messages so far, in order.
    """

    def __init__(self) -> None:
        self._ledger = PortLedger()
        self.sent: list[EngineMessage] = []
        self.is_closed = False

    @property
    def info(self) -> EngineInfo | None:
        return self._ledger.info

    @property
    def status(self) -> EngineStatus:
        return self._ledger.status

    def start(self, on_events: Callable[[StepEvents], None], *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        del loop
        self._ledger.open(on_events)

    def send(self, message: EngineMessage) -> None:
        self._ledger.pass_on(message, self.sent.append)

    def close(self, timeout_s: float | None = None) -> None:
        del timeout_s
        self.is_closed = True
        self._ledger.end_all(Cancelled(), EngineStatus(state="stopped"))

    def become_ready(self, info: EngineInfo | None = None) -> None:
        """Publish that the engine is ready."""
        self.publish(StepEvents(status=EngineStatus(state="ready"), info=fake_info() if info is None else info))

    def publish(self, events: StepEvents) -> None:
        """Publish as the engine would, on the calling thread."""
        self._ledger.deliver(events)
