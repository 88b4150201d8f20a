"""One child process of an engine, seen from its parent."""

from __future__ import annotations

import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
from logging import getLogger
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from headrace_scheduling.config import ChildSetup
from headrace_scheduling.framing import Unframer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_scheduling.messages import EngineMessage, StepEvents

_MODULE = "headrace_scheduling.engine_process"
_READ_BYTES = 1 << 16
# What the child may write ahead, so that a loop which is busy for a while delays no step.
_BUFFER_BYTES = 1 << 20


class EngineChild:
    """A started child. Messages are written by a thread of their own, so that `put` never blocks.

    Args:
        config: a pickled `EngineConfig`.
    """

    def __init__(self, config: bytes) -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        with theirs:
            # A session of its own keeps the terminal's signals away; the closing socket tells it of our end.
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._socket = ours
        self._unframer = Unframer()
        self._connection = Connection(os.dup(ours.fileno()))
        self._outgoing: queue.SimpleQueue[bytes | EngineMessage | None] = queue.SimpleQueue()
        setup = ChildSetup(tuple(sys.path), getLogger("headrace_scheduling").getEffectiveLevel())
        self._outgoing.put(pickle.dumps(setup))
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
        return [pickle.loads(payload) for payload in self._unframer.feed(data)] if data else None  # noqa: S301 - our own child

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
