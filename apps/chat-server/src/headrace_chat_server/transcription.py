"""Whisper beside the language model: the audio routes of the transcription server, mounted in this one."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from attrs import define, field

from headrace_chat_server.errors import ModelUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.routing import BaseRoute

    from headrace_chat_server.settings import WhisperSettings
    from headrace_http_api import ApiServices
    from headrace_http_api.audio import AudioServices
    from headrace_models.transcription import BackendLoader, TranscriptionService

__all__ = ["Transcription", "make_transcription"]


@define(kw_only=True)
class Transcription:
    """The service, and the routes that it answers. Close it at the end."""

    service: "TranscriptionService"
    _services: "AudioServices | None" = field(default=None, init=False)

    def routes(self, services: "ApiServices") -> "Sequence[BaseRoute]":
        """Make the routes; a route group of `create_app`."""
        from headrace_http_api.audio import AudioServices, routes

        async def transcriber() -> "TranscriptionService":
            return self.service

        self._services = AudioServices(
            transcriber=transcriber,
            server=services.server,
            clock=services.clock,
            strict=services.strict,
            config=services.config,
            streams=services.streams,
        )
        return routes(self._services)

    async def drain(self, timeout_s: float) -> bool:
        """Take no more audio, and wait for what runs; whether all of it ended in time."""
        return await self.service.drain(timeout_s)

    async def close(self) -> None:
        """End sessions, and what runs. Idempotent."""
        if self._services is not None:
            self._services.sessions.close_all()
        await self.service.close()


def make_transcription(settings: "WhisperSettings", *, loader: "BackendLoader | None" = None) -> Transcription | None:
    """Find the Whisper model that the settings name, fetching it where needed; None if they name none.

    Nothing is loaded before the first request that needs it.

    Args:
        loader: replaces the loader of the model.

    Raises:
        ModelUnavailable: there is no such model, or a package that the routes need is missing.
    """
    from headrace_models import ModelError
    from headrace_models.transcription import TranscriptionService, WhisperLoader

    if settings.model is None:
        return None
    if find_spec("websockets") is None:
        raise ModelUnavailable(
            "--whisper-model needs the package websockets for live sessions: install headrace-chat-server[whisper]"
        )
    name = settings.model
    if loader is None:
        from headrace_models.whisper import resolve_whisper

        try:
            source = resolve_whisper(name, progress=True)
        except ModelError as error:
            raise ModelUnavailable(f"--whisper-model: {error}") from error
        loader, name = WhisperLoader(source=source), source.name
    idle_unload_s = None if settings.resident else settings.idle_unload_s
    return Transcription(service=TranscriptionService(loader, model_id=name, idle_unload_s=idle_unload_s))
