"""Thirty clips of English speech with what is said in them, for `word_errors.py`; the same samples on every machine.

Ten are real speech that lies in `tests/models/speech`, four are voices that packages of the index carry, five are made
of those by noise, distance and silence, eleven are spoken by eSpeak NG (`espeakng-loader`, which carries the engine).
All noise is seeded.
"""

import ctypes
import io
import json
import wave
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen
from numpy.typing import NDArray
from platformdirs import user_cache_path

from headrace_models.audio import read_audio
from headrace_models.index_models import IndexModel, fetch_index_model

if TYPE_CHECKING:
    from collections.abc import Callable

RATE = 16_000
SPEECH = Path(__file__).parent.parent / "models" / "speech"
CACHE = user_cache_path("headrace") / "speech"

Samples = NDArray[np.float32]


@frozen
class Clip:
    name: str
    kind: str
    text: str
    samples: Samples

    @property
    def duration_s(self) -> float:
        return len(self.samples) / RATE


# ---- carried by packages --------------------------------------------------------------------------------------------


def _of_audioeval(file: str, sha256: str, size_bytes: int) -> IndexModel:
    path = f"pytest_audioeval/samples/audio/en/{file}.wav"
    return IndexModel(
        package="pytest-audioeval", version="0.1.3", file=path, sha256=sha256, size_bytes=size_bytes, licence="MIT"
    )


CARRIED = [
    (
        "carried-counting",
        "One two three four five six seven eight nine ten.",
        _of_audioeval("counting", "2b69b8f7894de9774e7433db6bfa1874944e25ed806826c507bed27b9e69fe15", 191_164),
    ),
    (
        "carried-hello",
        "Hello world.",
        _of_audioeval("hello_world", "264c92e881fcc3bb7585ff666d129095fb5717c2cc333d10f253a34186be78ac", 73_256),
    ),
    (
        "carried-fox",
        "The quick brown fox jumps over the lazy dog.",
        _of_audioeval("quick_brown_fox", "adc24a9b99267932370842f0d5be866dc2cd09e65af9762469c198493e36870b", 184_952),
    ),
    (
        "carried-nature",
        "Some call me nature, others call me mother nature.",
        IndexModel(
            package="f5-tts",
            version="1.1.22",
            file="f5_tts/infer/examples/basic/basic_ref_en.wav",
            sha256="b0e22048e72414fcc1e6b6342e47a774d748a195ed34e4a5b3fcf416707f2b71",
            size_bytes=256_018,
            licence="MIT",
        ),
    ),
]


# ---- spoken by eSpeak NG --------------------------------------------------------------------------------------------


@frozen
class Spoken:
    name: str
    voice: str
    words_per_minute: int
    text: str


SPOKEN = [
    Spoken(
        "us-slow", "en-us", 125, "The ferry leaves the harbour every morning at seven, unless the fog is too thick."
    ),
    Spoken("us-fast", "en-us", 230, "Please remember to lock the back door before you go to bed tonight."),
    Spoken(
        "us-female",
        "en-us+f3",
        160,
        "My sister planted two apple trees behind the old barn, and both of them survived.",
    ),
    Spoken("gb-male", "en+m3", 165, "We measured the river again in the spring, and it was deeper than the map says."),
    Spoken("gb-female", "en+f2", 150, "There is a small bakery next to the station where they sell fresh bread."),
    Spoken("rp-clear", "en-gb-x-rp", 155, "The committee will meet again on Thursday to discuss the new library."),
    Spoken(
        "scottish", "en-gb-scotland", 150, "It rained all afternoon, so the children stayed inside and played cards."
    ),
    Spoken("caribbean", "en-029", 150, "The fishermen brought their boats back to the beach before the storm."),
    Spoken("us-noisy", "en-us+m7", 160, "Turn left at the second bridge and follow the road until you see the mill."),
    Spoken("gb-silence", "en+m1", 160, "Nobody knew who had written the letter, or why it was never sent."),
    Spoken(
        "us-long",
        "en-us+m2",
        165,
        "A mill needs more than water. It needs a channel that brings the water at the right height, and a gate that "
        "lets in no more than the wheel can carry. When the river is low, the miller waits. When it is high, he opens "
        "the second gate and lets the rest flow past. Some people thought that this was a waste. He told them that the "
        "flood had taken three wheels from his father, and that none of them had been cheap. In the evening he walked "
        "along the channel and cleared away the leaves. On Sundays the wheel stood still, and the children of the "
        "village came to look at the fish.",
    ),
]

_PACKAGE = IndexModel(
    package="espeakng-loader",
    version="0.2.4",
    file="espeakng_loader/libespeak-ng.so.1.52.0",
    sha256="b15ce0803b26254e8a0d088c6b9281a2637b2b02613147cc320cfdefaf2c3ccf",
    size_bytes=661_568,
    licence="GPL-3.0-or-later",
)
_SYNCHRONOUS, _UTF8, _RATE_PARAMETER = 2, 1, 1


class _Voice:
    """eSpeak NG, which a process has once."""

    def __init__(self) -> None:
        path = fetch_index_model(_PACKAGE, cache_dir=CACHE)
        self._library = ctypes.CDLL(str(path))
        self._rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, str(path.parent).encode(), 0)
        if self._rate <= 0:
            raise SystemExit(f"eSpeak NG finds no data in {path.parent}")
        self._pieces: list[bytes] = []
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self._callback = kind(self._take)
        self._library.espeak_SetSynthCallback(self._callback)

    def _take(self, samples: object, count: int, _events: object) -> int:
        if samples and count > 0:
            self._pieces.append(ctypes.string_at(samples, 2 * count))
        return 0

    def say(self, spoken: Spoken) -> Samples:
        """Return the text as samples at 16 kHz."""
        self._pieces.clear()
        if self._library.espeak_SetVoiceByName(spoken.voice.encode()) != 0:
            raise SystemExit(f"eSpeak NG has no voice {spoken.voice!r}")
        self._library.espeak_SetParameter(_RATE_PARAMETER, spoken.words_per_minute, 0)
        text = spoken.text.encode() + b"\0"
        self._library.espeak_Synth(text, len(text), 0, 0, 0, _UTF8, None, None)
        return read_audio(_wav(b"".join(self._pieces), self._rate))


def _wav(data: bytes, rate: int) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(data)
    return buffer.getvalue()


# ---- made worse -----------------------------------------------------------------------------------------------------


def with_noise(samples: Samples, snr_db: float, *, seed: int, is_pink: bool = False) -> Samples:
    """Add white or pink noise of a signal-to-noise ratio."""
    noise = np.random.default_rng(seed).standard_normal(len(samples))
    if is_pink:
        spectrum = np.fft.rfft(noise)
        spectrum /= np.sqrt(np.arange(1, len(spectrum) + 1))
        noise = np.fft.irfft(spectrum, len(samples))
    power = np.mean(np.square(samples)) / np.mean(np.square(noise)) / 10 ** (snr_db / 10)
    return (samples + noise * np.sqrt(power)).astype(np.float32)


def with_echo(samples: Samples, *, seed: int) -> Samples:
    """Put the voice into a room that rings for four tenths of a second."""
    count = int(0.4 * RATE)
    tail = np.random.default_rng(seed).standard_normal(count) * np.exp(-6.9 * np.arange(count) / count) * 0.06
    tail[0] = 1.0
    length = len(samples) + count
    wet = np.fft.irfft(np.fft.rfft(samples, length) * np.fft.rfft(tail, length), length)
    return (wet / max(1.0, float(np.abs(wet).max()))).astype(np.float32)


def with_silence(samples: Samples, before_s: float, after_s: float) -> Samples:
    """Put silence around it."""
    return np.pad(samples, (round(before_s * RATE), round(after_s * RATE)))


def joined(parts: list[Samples], pause_s: float) -> Samples:
    """Put parts one after the other with pauses between."""
    pause = np.zeros(round(pause_s * RATE), np.float32)
    return np.concatenate([piece for part in parts for piece in (part, pause)])


# ---- all of them ----------------------------------------------------------------------------------------------------


def real_clips() -> dict[str, Clip]:
    """The clips that lie in the repository, by name."""
    texts = json.loads((SPEECH / "texts.json").read_text())
    clips = [Clip(Path(file).stem, "real", text, read_audio(SPEECH / file)) for file, text in texts.items()]
    return {clip.name: clip for clip in clips}


def all_clips() -> list[Clip]:
    """All thirty; fetches what is not here yet."""
    real = real_clips()
    austen = [clip for name, clip in real.items() if name.startswith("austen")]
    changes: list[tuple[str, str, Callable[[Samples], Samples]]] = [
        ("austen-0870", "white noise, 10 dB", lambda samples: with_noise(samples, 10, seed=1)),
        ("austen-0920", "pink noise, 5 dB", lambda samples: with_noise(samples, 5, seed=2, is_pink=True)),
        ("austen-0890", "3 s before, 6 s after", lambda samples: with_silence(samples, 3, 6)),
        ("cards-5", "echo, a tenth as loud", lambda samples: with_echo(samples, seed=3) * np.float32(0.1)),
    ]
    clips = list(real.values())
    clips += [
        Clip(f"{name}-{place}", kind, real[name].text, change(real[name].samples))
        for place, (name, kind, change) in enumerate(changes)
    ]
    text = " ".join(clip.text for clip in austen)
    clips.append(Clip("austen-all", "joined, pauses of 2.5 s", text, joined([clip.samples for clip in austen], 2.5)))
    clips += [
        Clip(name, "carried", text, read_audio(fetch_index_model(model, cache_dir=CACHE)))
        for name, text, model in CARRIED
    ]
    voice = _Voice()
    for spoken in SPOKEN:
        samples, kind = voice.say(spoken), f"eSpeak {spoken.voice}, {spoken.words_per_minute} wpm"
        if spoken.name == "us-noisy":
            samples, kind = with_noise(samples, 12, seed=4), f"{kind}, white noise, 12 dB"
        if spoken.name == "gb-silence":
            samples, kind = with_silence(samples, 8, 12), f"{kind}, 8 s before, 12 s after"
        clips.append(Clip(spoken.name, kind, spoken.text, samples))
    return clips
