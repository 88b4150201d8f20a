"""The open sessions of a server: how many there may be, who holds the model, and when one was forgotten."""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Coroutine, Generator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from attrs import define, field

from headrace_http_api.audio.fields import TranscriptionFields
from headrace_http_api.audio.session import Dictation
from headrace_http_api.audio.transcripts import JoinedTranscript, Segment
from headrace_http_api.audio_ports import Pcm, Transcriber
from headrace_http_api.errors import NotFound, SessionClosed, TooManySessions

__all__ = ["Session", "SessionRegistry"]

# Ids of sessions that are over are told from unknown ones for so many sessions.
MAX_REMEMBERED = 1024

T = TypeVar("T")


@define(eq=False)
class SessionRegistry:
    """Sessions by id, and the number of all that are open, live ones included.

    Attributes:
        max_open: sessions at a time.
        idle_s: one that hears nothing for so long is closed.
    """

    max_open: int = 64
    idle_s: float = 600.0
    num_open: int = field(default=0, init=False)
    _sessions: dict[str, "Session"] = field(factory=dict[str, "Session"], init=False)
    _over: OrderedDict[str, None] = field(factory=OrderedDict[str, None], init=False)

    @contextmanager
    def slot(self, transcriber: Transcriber) -> Generator[None]:
        """Count a session, and hold the model for it.

        Raises:
            TooManySessions: as many are open as may be.
        """
        if self.num_open >= self.max_open:
            raise TooManySessions(
                f"{self.num_open} sessions are open, as many as may be; finish or delete one, or try again later"
            )
        with transcriber.hold():
            self.num_open += 1
            try:
                yield
            finally:
                self.num_open -= 1

    def open(self, dictation: Dictation, fields: TranscriptionFields) -> "Session":
        """Open a session.

        Raises:
            TooManySessions: as many are open as may be.
        """
        resources = ExitStack()
        resources.enter_context(self.slot(dictation.transcriber))
        session = Session(secrets.token_urlsafe(18), dictation, fields, self, resources)
        self._sessions[session.id] = session
        session.rearm()
        return session

    def get(self, session_id: str) -> "Session":
        """Return an open session.

        Raises:
            SessionClosed: it was finished, deleted, or closed because nothing came for long.
            NotFound: there was none of this id.
        """
        session = self._sessions.get(session_id)
        if session is not None:
            return session
        if session_id in self._over:
            raise SessionClosed("this session is over: it was finished, deleted, or nothing came for long; open one")
        raise NotFound("there is no session of this id; open one by POST /v1/audio/sessions", code="session_not_found")

    def close_all(self) -> None:
        """Close every session, such as when the server stops."""
        for session in list(self._sessions.values()):
            session.close()

    def forget(self, session: "Session") -> None:
        """Take a session that is over out."""
        if self._sessions.pop(session.id, None) is not None:
            self._over[session.id] = None
            while len(self._over) > MAX_REMEMBERED:
                self._over.popitem(last=False)


@define(eq=False)
class Session:
    """A dictation that several requests feed, one after the other; a failure of one ends it."""

    id: str
    dictation: Dictation
    fields: TranscriptionFields
    registry: SessionRegistry
    resources: ExitStack
    is_closed: bool = False
    _turn: asyncio.Lock = field(factory=asyncio.Lock)
    _work: asyncio.Future[Any] | None = None
    _failure: Exception | None = None
    _timer: asyncio.TimerHandle | None = None

    async def feed(self, pcm: Pcm) -> list[Segment]:
        """Take audio in, after whatever came before; returns the segments that have become final.

        Raises:
            SessionClosed: it is, or is closed meanwhile.
            Exception: what failed now or at an earlier call.
        """
        async with self._turn:
            self._check()
            try:
                return await self._run(self.dictation.feed(pcm))
            except SessionClosed:
                raise
            except Exception as exc:
                self._failure = exc
                raise

    async def finish(self) -> JoinedTranscript:
        """Return the whole transcript, and close.

        Raises:
            SessionClosed: it is, or is closed meanwhile.
            Exception: what failed now or at an earlier call.
        """
        async with self._turn:
            try:
                self._check()
                return await self._run(self.dictation.finish())
            finally:
                self.close()

    def close(self) -> None:
        """End it wherever it is; harmless when it is over."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._work is not None:
            self._work.cancel()
        self.registry.forget(self)
        self.resources.close()

    def rearm(self) -> None:
        """Begin to count the time anew in which nothing comes."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.is_closed:
            self._timer = asyncio.get_running_loop().call_later(self.registry.idle_s, self._expire)

    def _expire(self) -> None:
        if self._turn.locked():
            self.rearm()
        else:
            self.close()

    def _check(self) -> None:
        if self.is_closed:
            raise SessionClosed("this session was closed; open another one")
        if self._failure is not None:
            raise self._failure

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        task = self._work = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task})
        finally:
            self._work = None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.rearm()
        if task.cancelled():
            raise SessionClosed("this session was closed; open another one")
        return task.result()
