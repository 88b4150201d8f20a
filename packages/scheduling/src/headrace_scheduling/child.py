"""One child process of an engine, seen from its parent."""

from __future__ import annotations

import pickle
import queue
import socket
import subprocess
import threading
from typing import TYPE_CHECKING

from headrace_scheduling.framing import Unframer
from headrace_scheduling.spawning import spawn
from headrace_scheduling.wire import unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_scheduling.messages import EngineMessage, StepEvents
    from headrace_scheduling.spawning import SpawnedProcess

_READ_BYTES = 1 << 16


class EngineChild:
    """A started child. Messages are written by a thread of their own, so that `put` never blocks.

    Args:
        config: a pickled `EngineConfig`.
        spawned: the process to use, which was started before; None starts one.
    """

    def __init__(self, config: bytes, spawned: SpawnedProcess | None = None) -> None:
        spawned = spawn() if spawned is None else spawned
        self._process = spawned.process
        self._socket = spawned.socket
        self._connection = spawned.connection
        self._unframer = Unframer()
        self._outgoing: queue.SimpleQueue[bytes | EngineMessage | None] = queue.SimpleQueue()
        self._outgoing.put(config)
        self._writer = threading.Thread(target=self._write, name="headrace-outbox", daemon=True)
        self._writer.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def put(self, message: EngineMessage) -> None:
        """Hand over a message; one that the child never reads is lost with the child."""
        self._outgoing.put(message)

    def fileno(self) -> int:
        """Return the descriptor that is readable when `receive` has something."""
        return self._socket.fileno()

    def receive(self, *, block: bool) -> Sequence[StepEvents] | None:
        """Return what has arrived, in order; with `block`, wait for some bytes. None when the child is gone."""
        try:
            data = self._socket.recv(_READ_BYTES, 0 if block else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return ()
        except OSError:
            return None
        return [unpack(payload) for payload in self._unframer.feed(data)] if data else None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process to end; whether it did."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def reap(self) -> int:
        """Release everything of a child that is gone, and return its exit code, negative for a signal."""
        if not self.wait(5.0):
            self.kill()
        code = self._process.wait()
        self._outgoing.put(None)
        self._writer.join()
        self._connection.close()
        self._socket.close()
        return code

    def _write(self) -> None:
        try:
            while (message := self._outgoing.get()) is not None:
                data = message if isinstance(message, bytes) else pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
                self._connection.send_bytes(data)
        except OSError:
            # The child is gone; the reader sees it too and ends what is outstanding.
            return
