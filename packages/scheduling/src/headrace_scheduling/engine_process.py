"""The program of an engine's child process: `python -m headrace_scheduling.engine_process FD`.

FD is this side of a socket pair. The parent sends a `ChildSetup`, a callable to warm up with or None, then, perhaps
much later, a pickled `EngineConfig`, then messages; the child answers with `StepEvents`, as `wire` writes them.
When the parent goes away the child ends at once.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from attrs import evolve

from headrace_scheduling.assembly import load_engine
from headrace_scheduling.faults import log_fault, summarize
from headrace_scheduling.framing import frame
from headrace_scheduling.inbox import Inbox
from headrace_scheduling.messages import EngineStatus, OperationResult, StepEvents
from headrace_scheduling.wire import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace_scheduling.config import EngineConfig
    from headrace_scheduling.engine import EngineLoop
    from headrace_scheduling.spawning import ChildSetup

_logger = logging.getLogger(__name__)
_EXIT_FAILED = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one engine until it stops; 0 after a clean stop or a reported loading failure."""
    (fd,) = map(int, sys.argv[1:] if argv is None else argv)
    # Ctrl-C in a terminal reaches the whole group; the parent decides how to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    os.set_inheritable(fd, False)
    connection = Connection(fd)
    setup: ChildSetup = connection.recv()
    sys.path[:] = setup.sys_path
    logging.basicConfig(level=setup.log_level, format="%(asctime)s %(levelname)s engine %(name)s: %(message)s")
    inbox = Inbox()
    loop = _load(connection, inbox)
    if loop is None:
        return 0
    try:
        loop.run()
    except Exception as error:  # noqa: BLE001 - the parent sees the exit and restarts
        log_fault(_logger, "the engine cannot go on", error)
        return _EXIT_FAILED
    return 0


def _load(connection: Connection, inbox: Inbox) -> EngineLoop | None:
    outlet = socket.socket(fileno=os.dup(connection.fileno()))

    def publish(events: StepEvents) -> None:
        outlet.sendall(frame(_pack(events)))

    try:
        config = _receive_config(connection)
        if config is None:
            return None
        threading.Thread(target=_read, args=(connection, inbox), name="headrace-inbox", daemon=True).start()
        return load_engine(config, inbox=inbox, publish=publish)
    except Exception as error:  # noqa: BLE001 - a loader may raise anything; it becomes the state
        # The parent tells the user the reason in one line; the frames are for developers.
        log_fault(_logger, "the model could not be loaded", error, level=logging.DEBUG)
        publish(StepEvents(status=EngineStatus(state="failed", detail=summarize(error))))
        return None


def _receive_config(connection: Connection) -> EngineConfig | None:
    """Warm up, then wait for the configuration; None if the parent turns out to need no engine."""
    warm_up: Callable[[], object] | None = connection.recv()
    if warm_up is not None:
        warm_up()
    try:
        return connection.recv()
    except EOFError:
        return None


def _read(connection: Connection, inbox: Inbox) -> None:
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        # The parent is gone: nobody waits for anything, and the engine may be deep in a step.
        os._exit(0)


def _pack(events: StepEvents) -> bytes:
    try:
        return pack(events)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        # Only a handler's value can be at fault; the rows of this step must not suffer.
        operations = tuple(_picklable(result, error) for result in events.operations)
        return pack(evolve(events, operations=operations))


def _picklable(result: OperationResult, error: Exception) -> OperationResult:
    if result.value is None:
        return result
    text = f"the value of type {type(result.value).__name__!r} cannot leave the engine's process: {error}"
    return OperationResult(operation_id=result.operation_id, error=text)


if __name__ == "__main__":
    sys.exit(main())
