"""The one worker of a service: started when something is sent, let go when nothing needs it, noticed when it dies."""

from __future__ import annotations

import asyncio
from functools import partial
from logging import getLogger
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_models.transcription.messages import Event, Message, WorkerConfig
    from headrace_models.transcription.workers import WorkerHandle

    WorkerMaker = Callable[[WorkerConfig, Callable[[Event], None], Callable[[str | None], None]], WorkerHandle]

__all__ = ["Supervisor"]

_logger = getLogger(__name__)


class Supervisor:
    """Keeps at most one worker, and passes its events on to the event loop. What a former one still says is dropped.

    Args:
        config: what a worker is made of.
        make_worker: starts one.
        on_event: takes events of the present worker.
        on_crash: called with the cause when it ends without being asked; the next message starts another.
    """

    def __init__(
        self,
        config: WorkerConfig,
        make_worker: WorkerMaker,
        *,
        on_event: Callable[[Event], None],
        on_crash: Callable[[str], None],
    ) -> None:
        self._config, self._make_worker = config, make_worker
        self._on_event, self._on_crash = on_event, on_crash
        self._worker: WorkerHandle | None = None
        self._number = 0
        self._endings: dict[int, asyncio.Future[None]] = {}

    @property
    def has_worker(self) -> bool:
        """Whether there is a worker."""
        return self._worker is not None

    def send(self, message: Message) -> None:
        """Send to the worker, started if there is none.

        Raises:
            OSError: it cannot be started.
        """
        if self._worker is None:
            loop = asyncio.get_running_loop()
            number = self._number + 1
            self._worker = self._make_worker(
                self._config,
                partial(_post, loop, self._take_event, number),
                partial(_post, loop, self._take_end, number),
            )
            self._number, self._endings[number] = number, loop.create_future()
        self._worker.put(message)

    def send_if_there(self, message: Message) -> None:
        """Send to the worker if there is one."""
        if self._worker is not None:
            self._worker.put(message)

    def let_go(self) -> asyncio.Future[None]:
        """Ask the worker to end, and return what tells that it has. The next message starts another."""
        assert self._worker is not None
        self._worker.stop()
        self._worker = None
        return self._endings[self._number]

    async def wait_gone(self) -> None:
        """Wait until every worker that was let go has ended."""
        if self._endings:
            await asyncio.wait(list(self._endings.values()))

    def _take_event(self, number: int, event: Event) -> None:
        if number == self._number and self._worker is not None:
            self._on_event(event)

    def _take_end(self, number: int, cause: str | None) -> None:
        self._endings.pop(number).set_result(None)
        if number == self._number and self._worker is not None:
            self._worker = None
            cause = cause or "the worker ended without being asked"
            _logger.error("%s", cause)
            self._on_crash(cause)


def _post(loop: asyncio.AbstractEventLoop, take: Callable[[int, Any], None], number: int, what: object) -> None:
    try:
        loop.call_soon_threadsafe(take, number, what)
    except RuntimeError:
        # The loop is closed: nobody waits for anything.
        return
