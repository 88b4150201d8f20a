"""The engine on a thread of this process: for library use and tests."""

from __future__ import annotations

import threading
from logging import getLogger
from typing import TYPE_CHECKING

from headrace_scheduling.assembly import load_engine
from headrace_scheduling.events import Cancelled, Failed
from headrace_scheduling.faults import log_fault, summarize
from headrace_scheduling.inbox import Inbox
from headrace_scheduling.ledger import PortLedger
from headrace_scheduling.messages import EngineInfo, EngineMessage, EngineStatus, StepEvents, Stop

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from headrace_scheduling.config import EngineConfig

_logger = getLogger(__name__)


class ThreadEnginePort:
    """An `EnginePort` whose engine runs on one daemon thread. An engine that cannot go on is not restarted."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._ledger = PortLedger()
        self._inbox = Inbox()
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)

    @property
    def info(self) -> EngineInfo | None:
        return self._ledger.info

    @property
    def status(self) -> EngineStatus:
        return self._ledger.status

    def start(self, on_events: Callable[[StepEvents], None], *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        del loop
        self._ledger.open(on_events)
        self._thread.start()

    def send(self, message: EngineMessage) -> None:
        self._ledger.pass_on(message, self._inbox.put)

    def close(self, timeout_s: float | None = None) -> None:
        timeout_s = self._config.stop_timeout_s if timeout_s is None else timeout_s
        if self._thread.ident is None:
            return
        self._inbox.put(Stop())
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _logger.warning("the engine did not stop within %s s; its thread ends with the process", timeout_s)
            self._ledger.end_all(Cancelled(), EngineStatus(state="stopped", detail="the engine did not stop in time"))

    def _run(self) -> None:
        try:
            load_engine(self._config, inbox=self._inbox, publish=self._ledger.deliver).run()
        except Exception as error:  # noqa: BLE001 - a loader or a device may raise anything; it becomes the state
            log_fault(_logger, "the engine ended", error)
            failed = Failed(code="engine_failed", message="the engine failed while this request ran")
            self._ledger.end_all(failed, EngineStatus(state="failed", detail=summarize(error)))
        else:
            # What was sent after the loop's last look at its inbox.
            if self._ledger.has_outstanding:
                self._ledger.end_all(Cancelled(), EngineStatus(state="stopped"))
