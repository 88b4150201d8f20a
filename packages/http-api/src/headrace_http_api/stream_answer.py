"""The answer to a request that streams: chunks of every choice as they come, then the usage, then the end."""

import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, TypeVar

from attrs import define, field

from headrace_http_api.dialect import ChoiceStream, Dialect
from headrace_http_api.encoded import Choice
from headrace_http_api.error_table import reply_to
from headrace_http_api.generation_request import GenerationFields
from headrace_http_api.running import Running
from headrace_http_api.sse import DONE, compact_json, frame
from headrace_scheduling.events import Finished, TextDelta

__all__ = ["frames"]

RequestT = TypeVar("RequestT", bound=GenerationFields)


async def frames(
    running: Running[RequestT], dialect: Dialect[RequestT], request_id: str
) -> AsyncGenerator[bytes, None]:
    """Yield the whole stream; a fault on the way is its last frame."""
    writer = _ChunkWriter(running, dialect.chunk_object_name)
    n = running.request.n
    opened = [
        _Opened(writer, place, dialect.open_stream(running, place, place * n + choice))
        for place in range(len(running.prompts))
        for choice in range(n)
    ]
    try:
        head = b"".join(part for one in opened for part in one.head())
        if head:
            yield head
        async for place, delta in running.deltas():
            one = opened[place * n + delta.choice]
            chunk = one.push(delta)
            end = running.prompts[place].generation.end_of(delta.choice)
            if isinstance(end, Finished):
                chunk += await _end(running, one, end)
            if chunk:
                yield chunk
        rest = b""
        for place, prompt in enumerate(running.prompts):
            for one, end in zip(opened[place * n :], prompt.generation.finished_choices, strict=False):
                if not one.is_ended:
                    rest += await _end(running, one, end)
    except Exception as exc:  # noqa: BLE001 - the response has started, so the table's answer travels as an event
        yield frame(reply_to(exc, request_id).body)
        return
    yield rest + writer.tail()


async def _end(running: Running[RequestT], one: "_Opened", end: Finished) -> bytes:
    # Before the client knows the end: its next turn may come at once.
    await running.remember(one.place, one.reply_ids)
    return one.end(end)


@define
class _Opened:
    """One choice of the stream; what is the same in each of its plain deltas is serialised once."""

    writer: "_ChunkWriter"
    place: int
    stream: ChoiceStream
    reply_ids: list[int] = field(factory=list[int])
    is_ended: bool = False
    _before: bytes = field(default=b"", init=False)
    _after: bytes = field(default=b"", init=False)

    def __attrs_post_init__(self) -> None:
        if self.stream.is_plain:
            # A fresh random mark, so that no name in the chunk can be taken for it.
            mark = uuid.uuid4().hex
            chunk = self.writer.chunk(self.stream.text_choice(mark))
            self._before, _, self._after = chunk.partition(compact_json(mark).encode())

    def head(self) -> Iterable[bytes]:
        choice = self.stream.head()
        return () if choice is None else (self.writer.chunk(choice),)

    def push(self, delta: TextDelta) -> bytes:
        self.reply_ids.extend(delta.token_ids)
        if not self.stream.is_plain:
            return self.writer.chunks(self.stream.push(delta))
        if not delta.text:
            return b""
        return b"".join((self._before, compact_json(delta.text).encode(), self._after))

    def end(self, finished: Finished) -> bytes:
        self.is_ended = True
        return self.writer.chunks(self.stream.end(finished))


class _ChunkWriter:
    """Writes the chunks of one stream, of OpenAI's object `kind`."""

    def __init__(self, running: Running[Any], kind: str) -> None:
        self._running = running
        self._kind = kind
        self._includes_usage = running.request.includes_usage

    def chunk(self, choice: Choice) -> bytes:
        body = self._running.envelope.body(self._kind, [choice])
        return frame(body | {"usage": None} if self._includes_usage else body)

    def chunks(self, choices: Sequence[Choice]) -> bytes:
        return b"".join(map(self.chunk, choices))

    def tail(self) -> bytes:
        if not self._includes_usage:
            return DONE
        body = self._running.envelope.body(self._kind, [])
        return frame(body | {"usage": self._running.usage()}) + DONE
