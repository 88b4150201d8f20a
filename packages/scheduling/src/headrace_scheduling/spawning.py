"""The process of an engine, started before it is known what it shall run: it warms up while its parent finds out.

Imports little, because a program starts it before it imports the rest.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from contextlib import suppress
from logging import getLogger
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ChildSetup", "SpawnedProcess", "spawn"]

_MODULE = "headrace_scheduling.engine_process"
# What the child may write ahead, so that a loop which is busy for a while delays no step.
_BUFFER_BYTES = 1 << 20


class ChildSetup(NamedTuple):
    """What a child process needs before it can unpickle anything else."""

    sys_path: tuple[str, ...]
    log_level: int | str


class SpawnedProcess:
    """A child process that waits for its pickled `EngineConfig`, and this side of the socket pair to it."""

    def __init__(self, process: subprocess.Popen[bytes], ours: socket.socket) -> None:
        self.process = process
        self.socket = ours
        self.connection = Connection(os.dup(ours.fileno()))

    def discard(self) -> None:
        """End a process that nothing uses; one that is gone already is no matter."""
        self.process.kill()
        self.process.wait()
        self.connection.close()
        self.socket.close()


def spawn(warm_up: Callable[[], object] | None = None, *, log_level: int | str | None = None) -> SpawnedProcess:
    """Start a child process.

    Args:
        warm_up: called in the child before it reads its configuration, for example to import what the loader needs.
            Picklable.
        log_level: of the child's log; None is this process's own.

    Raises:
        OSError: when no process can be started.
    """
    log_level = getLogger("headrace_scheduling").getEffectiveLevel() if log_level is None else log_level
    setup = ChildSetup(tuple(sys.path), log_level)
    first = [pickle.dumps(setup), pickle.dumps(warm_up)]
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    with theirs:
        # A session of its own keeps the terminal's signals away; the closing socket tells it of our end.
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    spawned = SpawnedProcess(process, ours)
    # One that is gone already shows to whoever reads from it.
    with suppress(OSError):
        for data in first:
            spawned.connection.send_bytes(data)
    return spawned
