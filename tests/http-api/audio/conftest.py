"""A small fake transcription service, steered by a script."""

import asyncio
import contextlib
import tempfile
from collections import deque
from pathlib import Path

import httpx
import pytest
from attrs import define, evolve, field, frozen

from headrace_http_api import ApiConfig, ServerInfo
from headrace_http_api.audio import AudioServices, create_audio_app
from headrace_http_api.audio_ports import SAMPLE_RATE, Pcm, TranscriptionOptions


@frozen(kw_only=True)
class FakeWord:
    text: str
    start_s: float
    end_s: float
    probability: float = 0.9


@frozen(kw_only=True)
class FakeSegment:
    text: str
    start_s: float
    end_s: float
    tokens: tuple[int, ...] = (50364, 1, 50414)
    temperature: float = 0.0
    avg_logprob: float = -0.25
    compression_ratio: float = 1.5
    no_speech_prob: float = 0.01
    words: tuple[FakeWord, ...] = ()


@frozen(kw_only=True)
class FakeTranscript:
    text: str
    segments: tuple[FakeSegment, ...]
    duration_s: float
    language: str = "en"
    vocabulary: object = None


@frozen(kw_only=True)
class FakeProgress:
    segments: tuple[FakeSegment, ...]
    position_s: float
    duration_s: float


@frozen(kw_only=True)
class FakeTimings:
    load_s: float = 0.5
    queue_s: float = 0.0
    vad_s: float = 0.0
    transcribe_s: float = 1.25
    total_s: float = 1.75


@frozen(kw_only=True)
class FakeStats:
    is_resident: bool = True
    num_loads: int = 1
    num_unloads: int = 0
    num_requests: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    last_load_s: float | None = 0.5
    idle_unload_s: float | None = 0.0


def segment(text, start_s, end_s, *, has_words=False):
    """Make a segment; its words share its time evenly."""
    pieces = [f" {word}" for word in text.split()]
    each = (end_s - start_s) / max(1, len(pieces))
    words = tuple(
        FakeWord(text=piece, start_s=start_s + place * each, end_s=start_s + (place + 1) * each)
        for place, piece in enumerate(pieces)
    )
    return FakeSegment(text=text, start_s=start_s, end_s=end_s, words=words if has_words else ())


@define(eq=False)
class FakeTake:
    """Plays a script: a segment is a progress, an event is waited for, an exception is raised."""

    service: "FakeTranscriber"
    duration_s: float
    script: deque
    speech_spans: tuple | None = None
    vocabulary: object = None
    language: str = "en"
    timings: FakeTimings = field(factory=FakeTimings)
    is_closed: bool = False
    _said: list = field(factory=list)
    _has_begun: bool = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self._has_begun and not isinstance(self.script[0] if self.script else None, Exception):
            self._has_begun = True
            return FakeProgress(segments=(), position_s=0.0, duration_s=self.duration_s)
        while self.script:
            item = self.script.popleft()
            if isinstance(item, asyncio.Event):
                self.service.waiting.set()
                await item.wait()
            elif isinstance(item, Exception):
                raise item
            else:
                self._said.append(item)
                return FakeProgress(segments=(item,), position_s=item.end_s, duration_s=self.duration_s)
        raise StopAsyncIteration

    @property
    def transcript(self):
        return FakeTranscript(
            text="".join(one.text for one in self._said).strip(),
            segments=tuple(self._said),
            duration_s=self.duration_s,
            vocabulary=self.vocabulary,
            language=self.language,
        )

    async def aclose(self):
        self.is_closed = True


@define(eq=False)
class FakeDetector:
    """Hears speech in every frame whose first sample is not 0."""

    _rest: bytes = b""

    async def feed(self, pcm):
        data = self._rest + pcm.data
        size = 4 * 512
        count = len(data) // size
        self._rest = data[count * size :]
        return [1.0 if any(data[at * size : at * size + 4]) else 0.0 for at in range(count)]


@define(eq=False)
class FakeTranscriber:
    """Transcribes whatever it gets as `script`, or as `answer(pcm, options)` says.

    A file is audio if it begins with `RIFF`; the fake takes the rest of it for float32 samples.
    """

    model_id: str = "whisper-fake"
    script: list = field(factory=lambda: [segment(" Hello there.", 0.0, 1.0), segment(" Bye.", 1.0, 2.0)])
    answer: object = None
    refusal: Exception | None = None
    refusals: list = field(factory=list)
    options_refusal: Exception | None = None
    detector_refusal: Exception | None = None
    speech_spans: tuple | None = None
    vocabulary: object = None
    can_unload: bool = True
    submitted: list = field(factory=list)
    takes: list = field(factory=list)
    num_held: int = 0
    waiting: asyncio.Event = field(factory=asyncio.Event)
    released: asyncio.Event = field(factory=asyncio.Event)
    paths: list = field(factory=list)

    def stats(self):
        return FakeStats(num_requests=len(self.takes))

    def check(self, options):
        assert isinstance(options, TranscriptionOptions)
        if self.options_refusal is not None:
            raise self.options_refusal

    async def read(self, audio):
        if isinstance(audio, Path):
            self.paths.append(audio)
            audio = audio.read_bytes()
        if not audio.startswith(b"RIFF"):
            raise AudioUnreadable("the audio is of no known form.")
        data = audio[4:]
        return Pcm(data[: len(data) // 4 * 4])

    async def submit(self, audio, options):
        if self.refusal is not None:
            raise self.refusal
        if self.refusals:
            raise self.refusals.pop()
        assert isinstance(options, TranscriptionOptions)
        pcm = audio if isinstance(audio, Pcm) else await self.read(audio)
        self.submitted.append((pcm, options))
        script = self.script if self.answer is None else self.answer(pcm, options)
        take = FakeTake(self, pcm.duration_s, deque(script), speech_spans=self.speech_spans, vocabulary=self.vocabulary)
        self.takes.append(take)
        return take

    def new_speech_detector(self):
        if self.detector_refusal is not None:
            raise self.detector_refusal
        return FakeDetector()

    @contextlib.contextmanager
    def hold(self):
        self.num_held += 1
        try:
            yield
        finally:
            self.num_held -= 1
            self.released.set()

    async def unload(self):
        return self.can_unload and self.num_held == 0


_BASES = {
    "AudioTooLarge": "AudioError",
    "AudioTooShort": "AudioError",
    "AudioUnreadable": "AudioError",
    "UnknownLanguage": "InvalidTranscribeOption",
}


def error_type(name):
    """Make an error class such as `headrace_models` has, without importing it: the table goes by its name."""
    base = error_type(_BASES[name]) if name in _BASES else ValueError
    return type(name, (base,), {"__module__": "headrace_models.errors"})


def error_named(name, message):
    return error_type(name)(message)


AudioUnreadable = error_type("AudioUnreadable")


def silence(seconds):
    return b"\0\0\0\0" * round(seconds * SAMPLE_RATE)


def speech(seconds):
    return b"\0\0\0\x3f" * round(seconds * SAMPLE_RATE)


TWO_SECONDS = b"RIFF" + speech(2)


@pytest.fixture(scope="session")
def make_transcriber():
    return FakeTranscriber


@pytest.fixture
def transcriber():
    return FakeTranscriber()


def services_of(transcriber):
    async def get():
        return transcriber

    server = ServerInfo(name="headrace-transcribe", version="0.1.0", started_at=1_700_000_000.0)
    return AudioServices(transcriber=get, server=server, clock=lambda: 1_700_000_060.0)


@pytest.fixture
def serves():
    """What makes the services of a transcriber."""
    return services_of


@pytest.fixture
def audio_services(transcriber):
    return services_of(transcriber)


@pytest.fixture
def make_audio_client(audio_services):
    """Make an HTTP client of the audio routes, without a socket."""

    def make(**settings):
        app = create_audio_app(evolve(audio_services, config=ApiConfig(**settings)))
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8080")

    return make


@pytest.fixture
async def audio_client(make_audio_client):
    async with make_audio_client() as opened:
        yield opened


@pytest.fixture
def post(audio_client):
    """Post a form with two seconds of audio."""

    async def send(path="/v1/audio/transcriptions", *, content=TWO_SECONDS, fields=()):
        pairs = fields.items() if isinstance(fields, dict) else fields
        files = [("file", ("a.wav", content, "audio/wav")), *((name, (None, value)) for name, value in pairs)]
        return await audio_client.post(path, files=files)

    return send


@pytest.fixture(scope="session")
def make_segment():
    return segment


@pytest.fixture(scope="session")
def make_error():
    return error_named


@pytest.fixture(scope="session")
def make_transcript():
    def make(segments):
        text = "".join(one.text for one in segments).strip()
        return FakeTranscript(text=text, segments=tuple(segments), duration_s=2.0)

    return make


@pytest.fixture
def count_temporary():
    """Count the temporary files of uploads."""
    return lambda: len(list(Path(tempfile.gettempdir()).glob("headrace-audio-*")))


@pytest.fixture(scope="session")
def silent():
    return silence


@pytest.fixture(scope="session")
def spoken():
    return speech


@pytest.fixture(scope="session")
def make_word():
    return lambda text, start_s, end_s: FakeWord(text=text, start_s=start_s, end_s=end_s)


@pytest.fixture(scope="session")
def make_timed_segment():
    """Make a segment of words."""

    def make(words):
        text = "".join(word.text for word in words)
        return FakeSegment(text=text, start_s=words[0].start_s, end_s=words[-1].end_s, words=tuple(words))

    return make
