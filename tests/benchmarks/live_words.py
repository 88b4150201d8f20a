"""How many words are wrong in what live transcription promises, beside the same clips transcribed at once.

    uv run python tests/benchmarks/live_words.py [--model whisper-tiny.en] [--pass 0.65]

Replays the thirty clips of `word_errors.py` to a live session each, on a clock that only audio and passes move: a pass
takes so many seconds on it, whatever it takes here. Its figures do not depend on the machine.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator

from headrace_models.device import enable_fast_blas

enable_fast_blas()

import numpy as np  # noqa: E402
from attrs import define, field  # noqa: E402
from speech_clips import RATE, Samples, all_clips  # noqa: E402
from spoken_words import words_of, wrong_words  # noqa: E402

from headrace_http_api.audio.live import LiveTranscription  # noqa: E402
from headrace_http_api.audio.speech import SpeechTracker  # noqa: E402
from headrace_http_api.audio_ports import Pcm, SpeechFilter, TranscriptionOptions  # noqa: E402
from headrace_models.audio.speech import SpeechDetector  # noqa: E402
from headrace_models.transcription.requested import to_options  # noqa: E402
from headrace_models.whisper import TranscribeOptions, Transcription, WhisperModel, load_whisper, transcribe  # noqa: E402

CHUNK = RATE // 10
OPTIONS = TranscriptionOptions(language="en", word_timestamps=True, speech=SpeechFilter())


@define
class Detector:
    """Silero's, in this process."""

    detector: SpeechDetector = field(factory=SpeechDetector.load)

    async def feed(self, pcm: Pcm) -> list[float]:
        return list(self.detector.feed(np.frombuffer(pcm.data, "<f4")))


@define
class Take:
    """A pass that is over."""

    transcript: Transcription

    async def __aiter__(self) -> AsyncIterator[None]:
        return
        yield

    async def aclose(self) -> None:
        return None


@define
class Replay:
    """A clip that is heard while it is transcribed: the transcriber of its own session.

    Attributes:
        now_s: the clock.
        place: samples that were heard.
    """

    model: WhisperModel
    samples: Samples
    pass_s: float
    now_s: float = 0.0
    place: int = 0
    num_passes: int = 0
    session: LiveTranscription = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.session = LiveTranscription(self, OPTIONS, SpeechTracker(Detector(), SpeechFilter()))

    async def submit(self, audio: Pcm, options: TranscriptionOptions, /) -> Take:
        """Transcribe at once, and let the time of a pass go by."""
        found = transcribe(self.model, np.frombuffer(audio.data, "<f4"), to_options(options))
        self.num_passes += 1
        await self.wait(self.pass_s)
        return Take(found)

    async def wait(self, seconds: float) -> None:
        """Hear what is said meanwhile."""
        self.now_s += seconds
        while self.place + CHUNK <= min(self.now_s * RATE, len(self.samples)):
            await self.hear()

    async def hear(self) -> None:
        piece = self.samples[self.place : self.place + CHUNK]
        self.place += CHUNK
        await self.session.hear(Pcm(piece.astype("<f4").tobytes()))

    async def run(self) -> str:
        while self.place + CHUNK <= len(self.samples):
            if self.session.is_due:
                await self.session.advance()
            else:
                await self.wait(CHUNK / RATE)
        if self.place < len(self.samples):
            await self.hear()
        await self.session.finish()
        return "".join(final.text for final in self.session.finals)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="whisper-tiny.en")
    parser.add_argument("--pass", dest="pass_s", type=float, default=0.65, help="seconds that a pass takes")
    options = parser.parse_args()
    model = load_whisper(options.model)
    totals = np.zeros(3, int)
    for clip in all_clips():
        replay = Replay(model, clip.samples, options.pass_s)
        live, said = asyncio.run(replay.run()), words_of(clip.text)
        whole = transcribe(model, clip.samples, TranscribeOptions(language="en")).text
        wrong = [wrong_words(said, words_of(text)) for text in (live, whole)]
        totals += (len(said), *wrong)
        print(
            f"{clip.name}: {len(said)} words; wrong live {wrong[0]}, at once {wrong[1]}; {replay.num_passes} passes",
            flush=True,
        )
    print(f"all: {totals[0]} words; wrong live {totals[1]}, at once {totals[2]}")


if __name__ == "__main__":
    main()
