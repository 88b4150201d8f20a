"""The program of a worker's child process: `python -m headrace_models.transcription.worker_process FD`.

FD is this side of a socket pair. The parent sends a `WorkerSetup`, then a pickled `WorkerConfig`, then messages; the
child answers with events. When the parent goes away, or says `Stop`, the child ends at once: it owns nothing that is
worth a clean-up, and its memory returns with it.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace_models.transcription.messages import Event, Message, WorkerConfig, WorkerSetup

_logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the parent ends it."""
    (fd,) = map(int, sys.argv[1:] if argv is None else argv)
    # Ctrl-C in a terminal reaches the whole group; the parent decides how to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    os.set_inheritable(fd, False)
    connection = Connection(fd)
    try:
        _serve(connection)
    except Exception as error:  # noqa: BLE001 - whatever it is ends this process, and the parent ends what it waits for
        _log_fault(error)
        return 1
    return 0


def _serve(connection: Connection) -> None:
    setup: WorkerSetup = connection.recv()
    sys.path[:] = setup.sys_path
    logging.basicConfig(level=setup.log_level, format="%(asctime)s %(levelname)s whisper %(name)s: %(message)s")
    _enable_fast_blas()
    from headrace_models.transcription.worker import Worker

    config: WorkerConfig = connection.recv()
    worker = Worker(config, _publisher(connection))
    threading.Thread(target=_read, args=(connection, worker.put), name="headrace-inbox", daemon=True).start()
    worker.run()


def _log_fault(error: Exception) -> None:
    """Log where an error was raised, and its type: what it says may quote prompts or transcripts."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _logger.error("the model's process ends with %s at\n%s", type(error).__qualname__, frames)


def _enable_fast_blas() -> None:
    """Load a fast BLAS, which only a program may do, and only before the first import of mlx."""
    from headrace_models.device import enable_fast_blas

    enable_fast_blas()


def _publisher(connection: Connection) -> Callable[[Event], None]:
    lock = threading.Lock()

    def publish(event: Event) -> None:
        data = pickle.dumps(event, pickle.HIGHEST_PROTOCOL)
        with lock:
            connection.send_bytes(data)

    return publish


def _read(connection: Connection, put: Callable[[Message], None]) -> None:
    from headrace_models.transcription.messages import Stop

    try:
        while not isinstance(message := connection.recv(), Stop):
            put(message)
    except (EOFError, OSError):
        pass
    except Exception as error:  # noqa: BLE001 - a message that is lost would be waited for without end
        _log_fault(error)
        os._exit(1)
    # Nobody waits for anything, and the model may be deep in a batch.
    os._exit(0)


if __name__ == "__main__":
    # Without waiting for threads that still read: the parent waits for this end.
    os._exit(main())
