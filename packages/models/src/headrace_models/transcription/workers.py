"""A worker seen by its service: in a child process, whose end returns all memory, or on a thread of this one."""

from __future__ import annotations

import pickle
import queue
import socket
import subprocess
import sys
import threading
from logging import getLogger
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Protocol

from headrace_models.transcription.messages import Stop, WorkerSetup

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_models.transcription.messages import Event, Message, WorkerConfig

__all__ = ["ProcessWorker", "ThreadWorker", "WorkerHandle"]

_logger = getLogger(__name__)

_MODULE = "headrace_models.transcription.worker_process"
_STOP_TIMEOUT_S = 5.0


class WorkerHandle(Protocol):
    """A started worker. It publishes events from a thread of its own, and says at last how it ended."""

    def put(self, message: Message) -> None:
        """Hand a message over without waiting; one that is never read is lost with the worker."""
        ...

    def stop(self) -> None:
        """Ask it to end; a process that does not is killed. Returns at once: `on_end` tells."""
        ...


class ProcessWorker:
    """A worker in a child process.

    Args:
        config: what the worker is made of; picklable.
        on_event: takes events.
        on_end: called once, last: with None after `stop`, otherwise with what happened.
    """

    def __init__(
        self, config: WorkerConfig, on_event: Callable[[Event], None], on_end: Callable[[str | None], None]
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own keeps the terminal's signals away; the closing socket tells it of our end.
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._outgoing: queue.SimpleQueue[WorkerSetup | WorkerConfig | Message | None] = queue.SimpleQueue()
        self._outgoing.put(WorkerSetup(tuple(sys.path), getLogger("headrace_models").getEffectiveLevel()))
        self._outgoing.put(config)
        self._on_event, self._on_end = on_event, on_end
        self._is_stopping = False
        self._last_resort = threading.Timer(_STOP_TIMEOUT_S, self._process.kill)
        self._last_resort.daemon = True
        self._writer = threading.Thread(target=self._write, name="headrace-whisper-out", daemon=True)
        self._writer.start()
        threading.Thread(target=self._receive, name="headrace-whisper-in", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def put(self, message: Message) -> None:
        self._outgoing.put(message)

    def stop(self) -> None:
        self._is_stopping = True
        # Its messages may be stuck behind a pipe that it does not read.
        self._last_resort.start()
        self._outgoing.put(Stop())

    def _receive(self) -> None:
        try:
            while True:
                self._on_event(self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception as error:  # noqa: BLE001 - what cannot be understood would be waited for without end
            self._kill("an event of the model's process could not be taken", error)
        code = self._process.wait()
        self._last_resort.cancel()
        self._outgoing.put(None)
        self._writer.join()
        self._connection.close()
        self._on_end(None if self._is_stopping else _describe_exit(self.pid, code))

    def _write(self) -> None:
        try:
            while (message := self._outgoing.get()) is not None:
                self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except OSError:
            # The child is gone; the reader sees it too and ends what is outstanding.
            return
        except Exception as error:  # noqa: BLE001 - a message that is not sent would be waited for without end
            self._kill("a message to the model's process could not be sent", error)

    def _kill(self, what: str, error: Exception) -> None:
        _logger.error("%s (%s): it is ended", what, type(error).__qualname__)
        self._process.kill()


class ThreadWorker:
    """A worker on a thread of this process: for tests, and for programs that load a fast BLAS themselves.

    Args:
        As `ProcessWorker` takes them; nothing is pickled.
    """

    def __init__(
        self, config: WorkerConfig, on_event: Callable[[Event], None], on_end: Callable[[str | None], None]
    ) -> None:
        self._config, self._on_event, self._on_end = config, on_event, on_end
        self._waiting: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._fault: str | None = None
        threading.Thread(target=self._run, name="headrace-whisper", daemon=True).start()

    def put(self, message: Message) -> None:
        self._waiting.put(message)

    def stop(self) -> None:
        self._waiting.put(Stop())

    def _run(self) -> None:
        try:
            # Imports mlx, which must not hold up the service's event loop.
            from headrace_models.transcription.worker import Worker

            worker = Worker(self._config, self._on_event)
            threading.Thread(target=self._pass_on, args=(worker.put,), name="headrace-whisper-in", daemon=True).start()
            worker.run()
        except Exception as error:  # noqa: BLE001 - what the loop cannot handle ends it, as it would end a process
            self._on_end(_describe_fault(error))
        else:
            self._on_end(self._fault)

    def _pass_on(self, put: Callable[[Message], None]) -> None:
        is_over = False
        while not is_over:
            message = self._waiting.get()
            try:
                put(message)
            except Exception as error:  # noqa: BLE001 - what was not taken would be waited for without end
                self._fault = _describe_fault(error)
                put(message := Stop())
            is_over = isinstance(message, Stop)


def _describe_fault(error: Exception) -> str:
    # Only its type: what it says may quote prompts or transcripts.
    return f"the worker ended with {type(error).__name__}"


def _describe_exit(pid: int, code: int) -> str:
    how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
    return f"the process {pid} that ran the model {how}"
