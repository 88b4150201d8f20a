"""How long after a word is spoken live transcription promises it, and how long `finish` takes.

    uv run python tests/benchmarks/live_delay.py [--model whisper-tiny.en] [--rounds 3]

Starts `headrace-transcribe` and sends real speech to its WebSocket as a microphone would: a tenth of a second every
tenth of a second. A word is promised when the texts of all finals, followed by the stable text, have it. Its delay
counts from its end in the audio, as word times of the whole clip, transcribed at once, have it.

The speech is ten clips of two speakers: five sentences without pauses, then the same five and five commands with pauses
of 1.5 seconds. Each round ends with `finish` in the middle of speech: directly behind the last word of one more
sentence. One window's transcription is a file of thirty seconds of the same speech, sent to the same server.
"""

import argparse
import asyncio
import io
import json
import re
import statistics
import subprocess
import sys
import time
import wave
from difflib import SequenceMatcher

import httpx
import numpy as np
import websockets
from attrs import define, field, frozen
from speech_clips import RATE, Samples, real_clips
from spoken_words import words_of, wrong_words

CHUNK_S = 0.1
PAUSE_S = 1.5


@frozen
class Spoken:
    """A word, and when it ends in the audio."""

    text: str
    end_s: float


@define
class Heard:
    """What a live session told, and when, in seconds from the first sample."""

    promises: list[tuple[float, str]] = field(factory=list[tuple[float, str]])
    finish_s: float = 0.0
    finals: str = ""

    def take(self, event: dict[str, object], at_s: float) -> None:
        if event["type"] == "final":
            self.finals += str(event["text"])
            self.promises.append((at_s, self.finals))
        if event["type"] == "partial":
            self.promises.append((at_s, self.finals + str(event["stable"])))


def plain(text: str) -> str:
    return re.sub(r"\W", "", text).casefold()


# ---- the audio ------------------------------------------------------------------------------------------------------


async def word_ends(http: httpx.AsyncClient, samples: Samples) -> list[Spoken]:
    """Transcribe a clip at once, and return its words."""
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    answer = await http.post("/v1/audio/transcriptions", files={"file": ("a.wav", wav(samples))}, data=fields)
    return [Spoken(plain(word["word"]), word["end"]) for word in answer.json()["words"]]


async def make_speech(http: httpx.AsyncClient) -> tuple[Samples, list[Spoken], str]:
    """Return the audio, its words as they are heard in whole clips, and what is said."""
    clips = list(real_clips().values())
    sentences = [clip for clip in clips if clip.name.startswith("austen")]
    silence = np.zeros(round(PAUSE_S * RATE), np.float32)
    said = [*sentences, *clips, sentences[1]]
    parts, words = list[Samples](), list[Spoken]()
    for place, clip in enumerate(said):
        at_s = sum(map(len, parts)) / RATE
        words += [Spoken(word.text, at_s + word.end_s) for word in await word_ends(http, clip.samples)]
        parts.append(clip.samples)
        if len(sentences) <= place + 1 < len(said):
            parts.append(silence)
    return np.concatenate(parts), words, " ".join(clip.text for clip in said)


def wav(samples: Samples) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


# ---- a session ------------------------------------------------------------------------------------------------------


async def speak(url: str, samples: Samples) -> Heard:
    """Send audio at its own pace, then `finish`."""
    heard = Heard()
    async with websockets.connect(f"ws{url.removeprefix('http')}/v1/audio/live", max_size=None) as socket:
        await socket.send(json.dumps({"type": "start", "encoding": "f32le", "language": "en"}))
        ready = json.loads(await socket.recv())
        assert ready["type"] == "ready", ready
        started = time.perf_counter()

        async def listen() -> None:
            async for message in socket:
                event = json.loads(message)
                if event["type"] == "error":
                    raise SystemExit(f"the session failed: {event}")
                heard.take(event, time.perf_counter() - started)

        listening = asyncio.create_task(listen())
        count = round(CHUNK_S * RATE)
        for place in range(0, len(samples), count):
            # A microphone has a piece once it is over.
            ends_at = started + (place + count) / RATE
            await asyncio.sleep(max(0.0, ends_at - time.perf_counter()))
            await socket.send(samples[place : place + count].astype("<f4").tobytes())
        sent = time.perf_counter()
        await socket.send('{"type": "finish"}')
        await listening
        heard.finish_s = time.perf_counter() - sent
    return heard


def delays(words: list[Spoken], heard: Heard) -> list[float]:
    """Return the delay of each word that was heard as in the whole clip."""
    final = [plain(word) for word in heard.finals.split()]
    counts = [(at_s, len(text.split())) for at_s, text in heard.promises]
    found: list[float] = []
    for match in SequenceMatcher(None, [word.text for word in words], final, autojunk=False).get_matching_blocks():
        for offset in range(match.size):
            place = match.b + offset
            told_s = next(at_s for at_s, count in counts if count > place)
            found.append(told_s - words[match.a + offset].end_s)
    return found


async def measure(url: str, rounds: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        samples, words, said = await make_speech(http)
        print(f"{len(samples) / RATE:.1f} s of speech, {len(words)} words", flush=True)
        every: list[float] = []
        for number in range(rounds):
            heard = await speak(url, samples)
            found = delays(words, heard)
            every += found
            window = wav(samples[: 30 * RATE])
            began = time.perf_counter()
            await http.post("/v1/audio/transcriptions", files={"file": ("a.wav", window)}, data={"language": "en"})
            window_s = time.perf_counter() - began
            print(
                f"round {number + 1}: {len(found)} of {len(words)} words; delay median {statistics.median(found):.2f} "
                f"s, 90 % {np.quantile(found, 0.9):.2f}, most {max(found):.2f}; finish {heard.finish_s:.2f} s, "
                f"one window {window_s:.2f} s; {wrong_words(words_of(said), words_of(heard.finals))} words wrong",
                flush=True,
            )
        print(f"all: {len(every)} words; median {statistics.median(every):.2f} s, 90 % {np.quantile(every, 0.9):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="whisper-tiny.en")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    command = [sys.executable, "-m", "headrace_transcription_server", options.model, "--port", "0"]
    with subprocess.Popen([*command, "--resident", "--preload"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            (url,) = re.findall(r"on (http://\S+);", process.stdout.readline())
            asyncio.run(measure(url, options.rounds))
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
