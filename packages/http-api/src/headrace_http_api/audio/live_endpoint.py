"""`/v1/audio/live`: a WebSocket that takes samples, and tells what is said while it is said."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from http import HTTPStatus
from typing import Any

from attrs import define, field
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from headrace_http_api.audio.endpoints import KNOWN_WITHOUT_EFFECT
from headrace_http_api.audio.fields import TranscriptionFields
from headrace_http_api.audio.formats import word_body
from headrace_http_api.audio.live import Final, LiveTranscription, Partial
from headrace_http_api.audio.live_fields import LiveFields, read_live_fields
from headrace_http_api.audio.services import AudioServices
from headrace_http_api.audio.session import new_tracker
from headrace_http_api.audio.speech import SpeechTracker
from headrace_http_api.audio_ports import Transcriber
from headrace_http_api.error_table import reply_to, rule_of
from headrace_http_api.errors import InvalidRequest, SessionClosed
from headrace_http_api.json_body import parse_object, shown
from headrace_http_api.middleware import request_id_of
from headrace_http_api.outlet import ClientStalled, abort_connection
from headrace_http_api.sse import compact_json
from headrace_http_api.validation import unknown_names

__all__ = ["live_routes"]

SUBPROTOCOL = "headrace-live"
MAX_MESSAGE_BYTES = 2**20
# Audio that waits beyond this stays in the socket, so that the client feels it.
MAX_BACKLOG_S = 30.0

_CLIENT_FAULT, _SERVER_FAULT, _NORMAL = 1008, 1011, 1000
_OWN_NAMES = frozenset({"type", "encoding", "sample_rate", "task", "interval_ms", "pause_ms"})


def live_routes(services: AudioServices) -> list[BaseRoute]:
    """The route of live sessions."""

    async def live(socket: WebSocket) -> None:
        await _Conversation(socket, services).run()

    return [WebSocketRoute("/v1/audio/live", live)]


@define(eq=False)
class _Conversation:
    """One client: its first message says how, then come samples, until it finishes or leaves."""

    socket: WebSocket
    services: AudioServices
    _changed: asyncio.Event = field(factory=asyncio.Event)

    async def run(self) -> None:
        offered: list[str] = self.socket.scope.get("subprotocols", [])
        await self.socket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
        try:
            with ExitStack() as held:
                await self._converse(held)
            async with self._in_time():
                await self.socket.close(_NORMAL)
        except WebSocketDisconnect:
            pass
        except ClientStalled:
            # It would not read an error either, nor answer a closing handshake.
            abort_connection(self.socket.scope)
        except Exception as exc:  # noqa: BLE001 - the handshake is over, so the table's answer travels as a message
            await self._fail(exc)

    async def _converse(self, held: ExitStack) -> None:
        message = await self._receive()
        body = _control(message, "start")
        fields = read_live_fields(body)
        transcriber = await self.services.transcriber()
        transcriber.check(fields.options())
        held.enter_context(self.services.sessions.slot(transcriber))
        tracker = _tracker(transcriber, fields)
        session = LiveTranscription(transcriber, fields.options(), tracker, fields.live)
        await self._send(
            {
                "type": "ready",
                "model": transcriber.model_id,
                "vad": tracker is not None,
                "ignored": self._ignored(body),
            }
        )
        await self._follow(session, fields)
        text = "".join(final.text for final in session.finals).strip()
        await self._send(
            {
                "type": "done",
                "text": text,
                "language": session.language or fields.shared.language or "",
                "duration": round(session.duration_s, 3),
            }
        )

    def _ignored(self, body: Mapping[str, Any]) -> list[str]:
        names = unknown_names(body, TranscriptionFields, KNOWN_WITHOUT_EFFECT | _OWN_NAMES)
        if names and self.services.strict:
            raise InvalidRequest(
                f"{shown(names[0])} is no field that this server knows, and it refuses such fields; leave it out",
                param=names[0],
                code="unknown_parameter",
            )
        return [name[:64] for name in names[:32]]

    async def _follow(self, session: LiveTranscription, fields: LiveFields) -> None:
        """Listen and transcribe side by side until the client finishes, then tell what is left."""
        tasks = [asyncio.ensure_future(self._listen(session, fields)), asyncio.ensure_future(self._speak(session))]
        listening, speaking = tasks
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # Until then it can only fail.
            (listening if listening.done() else speaking).result()
            session.end()
            self._changed.set()
            if session.is_outdated:
                # Nobody waits for what will be heard again.
                speaking.cancel()
                await asyncio.wait([speaking])
                tasks.append(speaking := asyncio.ensure_future(self._speak(session)))
            tasks.append(leaving := asyncio.ensure_future(self._leave()))
            await asyncio.wait([speaking, leaving], return_when=asyncio.FIRST_COMPLETED)
            (speaking if speaking.done() else leaving).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self, session: LiveTranscription, fields: LiveFields) -> None:
        while True:
            while session.backlog_s > MAX_BACKLOG_S:
                self._changed.clear()
                await self._changed.wait()
            message = await self._receive()
            data = message.get("bytes")
            if data is None:
                _control(message, "finish")
                return
            await session.hear(fields.decode(data))
            self._changed.set()

    async def _leave(self) -> None:
        """Wait until the client leaves; what it sends behind its finish is passed over.

        Raises:
            WebSocketDisconnect: it has left.
        """
        while (message := await self.socket.receive())["type"] != "websocket.disconnect":
            pass
        raise WebSocketDisconnect(message.get("code", _NORMAL))

    async def _speak(self, session: LiveTranscription) -> None:
        while not session.is_over:
            if session.is_due:
                events = await session.advance()
                self._changed.set()
                await self._tell(events)
            else:
                self._changed.clear()
                await self._changed.wait()

    # ---- messages --------------------------------------------------------------------------------------------

    async def _receive(self) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(self.services.sessions.idle_s):
                message = await self.socket.receive()
        except TimeoutError:
            raise SessionClosed("nothing came for long; open another session") from None
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", _NORMAL))
        size = len(message.get("bytes") or message.get("text") or b"")
        if size > MAX_MESSAGE_BYTES:
            raise InvalidRequest(
                f"a message has {size} bytes; at most {MAX_MESSAGE_BYTES} are taken: send smaller ones"
            )
        return message

    async def _tell(self, events: Sequence[Partial | Final]) -> None:
        for event in events:
            await self._send(_event_body(event))

    async def _send(self, body: Mapping[str, object]) -> None:
        async with self._in_time():
            await self.socket.send_text(compact_json(body))

    @asynccontextmanager
    async def _in_time(self) -> AsyncGenerator[None]:
        """Bound the wait for a client that reads nothing.

        Raises:
            ClientStalled: it took nothing for `stall_timeout_s`.
        """
        try:
            async with asyncio.timeout(self.services.config.stall_timeout_s):
                yield
        except TimeoutError:
            raise ClientStalled from None

    async def _fail(self, exc: Exception) -> None:
        body = reply_to(exc, request_id_of(self.socket.scope)).body
        is_clients = rule_of(exc).status < HTTPStatus.INTERNAL_SERVER_ERROR
        if self.socket.application_state is not WebSocketState.CONNECTED:
            return
        try:
            await self._send({"type": "error", **body})
            async with self._in_time():
                await self.socket.close(_CLIENT_FAULT if is_clients else _SERVER_FAULT)
        except (WebSocketDisconnect, RuntimeError):
            # It has left meanwhile.
            return
        except ClientStalled:
            abort_connection(self.socket.scope)


def _control(message: Mapping[str, Any], wanted: str) -> dict[str, Any]:
    """Read a message that is no audio.

    Raises:
        InvalidRequest: it is none of the wanted type.
    """
    text = message.get("text")
    if text is None:
        raise InvalidRequest('the first message must be text: JSON with "type": "start"', param="type")
    body = parse_object(text.encode())
    if body.get("type") != wanted:
        raise InvalidRequest(f"type is {shown(body.get('type'))}; here it must be {wanted!r}", param="type")
    return body


def _tracker(transcriber: Transcriber, fields: LiveFields) -> SpeechTracker | None:
    """Make what looks for speech; without a detector, and where none was asked for, words alone must do."""
    options = fields.options()
    try:
        return new_tracker(transcriber, options)
    except Exception as exc:
        is_missing = rule_of(exc).code == "vad_unavailable"
        if fields.needs_vad or not is_missing:
            raise
        return None


def _event_body(event: Partial | Final) -> dict[str, object]:
    times: dict[str, object] = {
        "utterance": event.utterance,
        "start": round(event.start_s, 3),
        "end": round(event.end_s, 3),
    }
    if isinstance(event, Partial):
        return {"type": "partial", "stable": event.stable, "text": event.text, **times}
    return {"type": "final", "text": event.text, **times, "words": [word_body(word) for word in event.words]}
