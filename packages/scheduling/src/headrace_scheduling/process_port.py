"""The engine in a child process: its faults cost a restart, and its Python never competes with the server's."""

from __future__ import annotations

import pickle
import threading
from logging import getLogger
from typing import TYPE_CHECKING

from headrace_scheduling.child import EngineChild
from headrace_scheduling.child_reader import ChildReader
from headrace_scheduling.events import Cancelled, Failed
from headrace_scheduling.ledger import PortLedger
from headrace_scheduling.messages import EngineInfo, EngineMessage, EngineState, EngineStatus, StepEvents, Stop
from headrace_scheduling.restarts import RestartPolicy

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from headrace_scheduling.config import EngineConfig
    from headrace_scheduling.spawning import SpawnedProcess

_logger = getLogger(__name__)


class ProcessEnginePort:
    """An `EnginePort` over a socket pair to a child process.

    The child starts in `start`, so it loads while the caller goes on. If it dies, every outstanding request ends with
    `engine_failed` and a new child starts; after too many deaths in a short time the state is `failed`. A model that
    cannot be loaded is not tried again.

    Args:
        config: picklable, because the child builds its engine from it.
        restarts: how often a dead child is replaced.
        first: a process that was started before, which becomes the first child; None starts one in `start`.
    """

    def __init__(
        self, config: EngineConfig, *, restarts: RestartPolicy | None = None, first: SpawnedProcess | None = None
    ) -> None:
        self._config = config
        self._first = first
        self._restarts = RestartPolicy() if restarts is None else restarts
        self._ledger = PortLedger()
        self._lock = threading.Lock()
        self._child: EngineChild | None = None
        self._is_closing = False
        self._supervisor = threading.Thread(target=self._supervise, name="headrace-engine-port", daemon=True)
        self._pickled = b""
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def info(self) -> EngineInfo | None:
        return self._ledger.info

    @property
    def status(self) -> EngineStatus:
        return self._ledger.status

    def start(self, on_events: Callable[[StepEvents], None], *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self._pickled = pickle.dumps(self._config, pickle.HIGHEST_PROTOCOL)
        self._ledger.open(on_events)
        self._child = EngineChild(self._pickled, self._first)
        self._supervisor.start()

    def send(self, message: EngineMessage) -> None:
        self._ledger.pass_on(message, self._put)

    def close(self, timeout_s: float | None = None) -> None:
        timeout_s = self._config.stop_timeout_s if timeout_s is None else timeout_s
        with self._lock:
            self._is_closing = True
            child = self._child
        if child is None:
            return
        if self._ledger.status.state in ("loading", "restarting"):
            # It reads no messages before the model is loaded, and holds nothing worth keeping.
            child.kill()
        else:
            child.put(Stop())
        if not child.wait(timeout_s):
            _logger.warning("the engine's process %d did not stop within %s s and is killed", child.pid, timeout_s)
            child.kill()
        self._supervisor.join()

    def _put(self, message: EngineMessage) -> None:
        if self._child is not None:
            self._child.put(message)

    def _supervise(self) -> None:
        child = self._child
        while child is not None:
            reader = ChildReader(child, self._ledger)
            if self._loop is not None:
                reader.read_on(self._loop)
            # What is left: all of it without a loop, and what a loop that was closed has not read.
            reader.read_here()
            child = self._follow(child, reader.last)

    def _follow(self, child: EngineChild, last: EngineStatus | None) -> EngineChild | None:
        """Decide what comes after a child that is gone, and end what it left open."""
        code = child.reap()
        with self._lock:
            if self._is_closing or (last is not None and last.state == "stopped"):
                self._ledger.end_all(Cancelled(), EngineStatus(state="stopped"))
                return None
            if last is not None and last.state == "failed":
                self._end_failed(last.detail, state="failed")
                return None
            cause = _describe_exit(child.pid, code)
            _logger.error("%s", cause)
            if self._ledger.status.state == "draining":
                self._end_failed(cause, state="stopped")
                return None
            if not self._restarts.allow():
                limit = f"{self._restarts.max_restarts} restarts within {self._restarts.window_s:g} s"
                self._end_failed(f"{cause}; not started again after {limit}", state="failed")
                return None
            self._end_failed(cause, state="restarting")
            try:
                self._child = EngineChild(self._pickled)
            except OSError as error:
                self._end_failed(f"{cause}; a new one could not be started: {error}", state="failed")
                return None
            return self._child

    def _end_failed(self, detail: str, *, state: EngineState) -> None:
        failed = Failed(
            code="engine_failed", message="the engine's process ended while this request ran; send it again"
        )
        num_restarts = self._restarts.num_restarts
        status = EngineStatus(state=state, detail=detail, num_restarts=num_restarts)
        self._ledger.end_all(failed, status)


def _describe_exit(pid: int, code: int) -> str:
    how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
    return f"the engine's process {pid} {how}"
