"""Whisper beside the language model: its routes answer on the same port, and both are closed together."""

from pathlib import Path

import httpx
import pytest

from headrace_chat_server.composition import compose
from headrace_chat_server.errors import ModelUnavailable
from headrace_chat_server.settings import WhisperSettings, build
from headrace_chat_server.transcription import make_transcription
from headrace_models import ModelSource
from headrace_models.transcription import TranscriberClosed
from headrace_scheduling.testing import ModelLoaderFake, ScriptedModel

# A loader that is never called: what is asked here needs no model.
NO_MODEL = dict
SOURCE = ModelSource(name="toy", path=Path("/no/such/folder"), format="folder")


async def test_the_audio_routes_are_mounted_and_end_with_the_server():
    """Bad audio is told by them, with the chat server's key; without the setting, there is nothing."""
    settings = build({"engine.transport": "thread", "server.api_keys": ("sesame",), "whisper.model": "none"})
    transcription = make_transcription(settings.whisper, loader=NO_MODEL)
    loader = ModelLoaderFake(ScriptedModel)
    for mounted in (transcription, None):
        composition = compose(settings, SOURCE, loader=loader, transcription=mounted)
        transport = httpx.ASGITransport(app=composition.make_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.post("/v1/audio/transcriptions")).status_code == 401
            client.headers["authorization"] = "Bearer sesame"
            form = {"files": {"file": ("a.wav", b"no sound")}, "data": {"model": "whisper"}}
            answer = await client.post("/v1/audio/transcriptions", **form)
            assert answer.status_code == (400 if mounted else 404)
            paths = (await client.get("/v1")).json()["endpoints"]
            assert ("/v1/audio/transcriptions" in paths) == (mounted is not None)
            assert "/v1/chat/completions" in paths
        assert await composition.drain(5)
        await composition.close()
    with pytest.raises(TranscriberClosed):
        await transcription.service.submit(b"RIFF")


def test_no_model_no_service_and_a_wrong_name_ends_the_start():
    """The message names the flag and what was looked for."""
    assert make_transcription(WhisperSettings()) is None
    with pytest.raises(ModelUnavailable, match=r"--whisper-model: .*/nowhere/at-all"):
        make_transcription(WhisperSettings(model="/nowhere/at-all"))


def test_live_sessions_need_their_package(monkeypatch):
    """The message names the extra."""
    monkeypatch.setattr("headrace_chat_server.transcription.find_spec", lambda name: None)
    with pytest.raises(ModelUnavailable, match=r"headrace-chat-server\[whisper\]"):
        make_transcription(WhisperSettings(model="whisper-base"))


@pytest.mark.parametrize(("values", "wanted"), [({}, 0.0), ({"idle_unload_s": 9.0}, 9.0), ({"resident": True}, None)])
def test_how_long_the_model_stays(values, wanted):
    """0 after each transcription, a number after so long, `resident` for good."""
    transcription = make_transcription(WhisperSettings(model="x", **values), loader=NO_MODEL)
    assert transcription.service.stats().idle_unload_s == wanted
