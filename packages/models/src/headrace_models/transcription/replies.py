"""What callers wait for that is no take: audio that is read, speech in a stream, the model's loading."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

from headrace_models.transcription.messages import Probabilities, Read, ReadAudio, Samples
from headrace_models.transcription.requested import to_audio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace_models.transcription.messages import Failed, Feed
    from headrace_models.transcription.requested import SamplesLike

__all__ = ["Replies", "Reply", "SpeechStream"]

T = TypeVar("T")


class Reply(Generic[T]):
    """What somebody waits for; nobody may be there any more when it comes."""

    def __init__(self) -> None:
        self._future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    async def wait(self) -> T:
        """Wait for it; raises what it failed with."""
        return await self._future

    def set(self, value: T) -> None:
        """Let it come."""
        if not self._future.done():
            self._future.set_result(value)

    def fail(self, error: Exception) -> None:
        """Let it fail."""
        if not self._future.done():
            self._future.set_exception(error)


class Replies:
    """Replies by the id of what was asked, and those who wait for the one loading of the model."""

    def __init__(self) -> None:
        self._asked: dict[int, Reply[Read | Probabilities]] = {}
        self._reading: set[int] = set()
        self._loads: list[Reply[None]] = []

    def __len__(self) -> int:
        return len(self._asked) + len(self._loads)

    @property
    def is_loading(self) -> bool:
        """Whether somebody waits for the model already."""
        return bool(self._loads)

    @property
    def num_reading(self) -> int:
        """How many files are being read or wait for it, whether or not somebody still waits for them."""
        return len(self._reading)

    def ask(self, message: ReadAudio | Feed) -> Reply[Read | Probabilities]:
        """Expect an answer."""
        if isinstance(message, ReadAudio):
            self._reading.add(message.request_id)
        reply = self._asked[message.request_id] = Reply[Read | Probabilities]()
        return reply

    def wait_load(self) -> Reply[None]:
        """Expect the model."""
        reply = Reply[None]()
        self._loads.append(reply)
        return reply

    def answer(self, event: Read | Probabilities) -> None:
        """Pass an answer on."""
        self._reading.discard(event.request_id)
        self._asked.pop(event.request_id).set(event)

    def fail(self, event: Failed) -> None:
        """Pass on that there is no answer; a cancel of a take that is over belongs to nothing here."""
        self._reading.discard(event.request_id)
        reply = self._asked.pop(event.request_id, None)
        if reply is not None and event.error is not None:
            reply.fail(event.error.make())

    def end_loads(self, error: Exception | None) -> None:
        """Tell all who wait for the model."""
        loads, self._loads = self._loads, []
        for reply in loads:
            if error is None:
                reply.set(None)
            else:
                reply.fail(error)

    def fail_all(self, error: Exception) -> None:
        """End everything."""
        asked, self._asked = self._asked, {}
        self._reading.clear()
        for reply in asked.values():
            reply.fail(error)
        self.end_loads(error)


class SpeechStream:
    """Tells how likely there is speech in a stream, piece by piece; remembers what it has heard."""

    def __init__(self, feed: Callable[[Samples], Awaitable[tuple[float, ...]]]) -> None:
        self._feed = feed

    async def feed(self, samples: SamplesLike, /) -> tuple[float, ...]:
        """Return the probabilities of the frames of 512 samples that are full now; the rest waits.

        Raises:
            TranscriptionFailed: the process that listens has died; the next piece begins anew.
            TranscriberClosed: the service closes.
        """
        audio = to_audio(samples)
        assert isinstance(audio, Samples)
        return await self._feed(audio)
