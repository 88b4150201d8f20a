"""A model that says the same in every window, real speech, and servers in this process."""

import io
import threading
import wave
from contextlib import asynccontextmanager

import mlx.core as mx
import numpy as np
import pytest
from attrs import define, field

from headrace_models.whisper import WhisperConfig
from headrace_models.whisper.alignment import TimedWord
from headrace_models.whisper.caches import AudioKeys
from headrace_models.whisper.decoded import DecodedWindow
from headrace_models.whisper.tokenizer import load_tokenizer
from headrace_transcription_server import TranscriptionSettings, create_transcription_server

CONFIG = WhisperConfig(
    num_mels=80,
    audio_context=1500,
    audio_state=8,
    audio_heads=1,
    audio_layers=1,
    vocab_size=51_864,
    text_context=448,
    text_state=8,
    text_heads=1,
    text_layers=1,
    is_multilingual=False,
)


@define(eq=False)
class Parrot:
    """A loader and a model: `Hello <there>` in each window, whose words last half a second each."""

    tokenizer: object
    gate: threading.Event = field(factory=threading.Event)
    config: WhisperConfig = CONFIG

    def __call__(self):
        return self

    def encode(self, mels):
        keys = mx.zeros((1, 1, len(mels[0]) // 2, 1))
        return [AudioKeys(((keys, keys),)) for _ in mels]

    def decode(self, requests):
        assert self.gate.wait(10)
        begin = self.tokenizer.special.timestamp_begin
        tokens = (begin, *self.tokenizer.encode(" Hello <there>"), begin + 50)
        return [
            DecodedWindow(
                tokens=tokens,
                text="Hello <there>",
                avg_logprob=-0.2,
                no_speech_prob=0.0,
                temperature=request.temperature,
                compression_ratio=1.0,
            )
            for request in requests
        ]

    def align(self, requests):
        return [self._words(request.text_tokens) for request in requests]

    def _words(self, tokens):
        found = self.tokenizer.split_words(tokens, "en")
        return [
            TimedWord(text=text, tokens=tuple(ids), start_s=place / 4, end_s=(place + 1) / 4, probability=0.9)
            for place, (text, ids) in enumerate(found)
        ]


@pytest.fixture(scope="session")
def english():
    return load_tokenizer(None, CONFIG.vocab_size, is_multilingual=False)


@pytest.fixture
def parrot(english):
    parrot = Parrot(english)
    parrot.gate.set()
    return parrot


@pytest.fixture
def serving(parrot):
    """Serves the parrot: `async with serving(port=0, ...) as (server, service)`."""

    @asynccontextmanager
    async def serve(**settings):
        options = TranscriptionSettings(**({"port": 0} | settings))
        server, service = await create_transcription_server(
            options, loader=parrot, model_id="parrot", transport="thread"
        )
        try:
            yield server, service
        finally:
            await server.close()

    return serve


@pytest.fixture(scope="session")
def tone():
    """A second of a quiet tone as a WAV file."""
    samples = (np.sin(np.arange(16_000) * 0.2) * 3000).astype("<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(samples.tobytes())
    return buffer.getvalue()
