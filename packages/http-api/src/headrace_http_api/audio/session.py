"""One dictation that comes in pieces: each complete window is transcribed at once (W-25)."""

import asyncio
from contextlib import AsyncExitStack

from attrs import define, evolve, field

from headrace_http_api.audio.context import SpokenContext
from headrace_http_api.audio.speech import SpeechTracker
from headrace_http_api.audio.transcripts import JoinedTranscript, Segment, settle, shifted
from headrace_http_api.audio_ports import (
    SAMPLE_RATE,
    Pcm,
    Take,
    Transcriber,
    Transcript,
    TranscriptionOptions,
    VocabularyUse,
)
from headrace_http_api.error_table import rule_of

__all__ = ["Dictation", "new_tracker", "transcribe"]

WINDOW_S = 30.0
SHORTEST_S = 0.1
# After a full queue; about what a window takes.
QUEUE_RETRY_S = 0.2
# Before the first speech so much audio is kept.
LEAD_S = 0.5
_BYTES_PER_SECOND = 4 * SAMPLE_RATE


def new_tracker(transcriber: Transcriber, options: TranscriptionOptions) -> SpeechTracker | None:
    """Make what looks for speech, if the options ask for it.

    Raises:
        VoiceDetectorMissing: nothing is installed that finds speech.
    """
    return None if options.speech is None else SpeechTracker(transcriber.new_speech_detector(), options.speech)


async def transcribe(transcriber: Transcriber, pcm: Pcm, options: TranscriptionOptions) -> Transcript:
    """Transcribe samples, waiting while the queue is full; cancelling this cancels the take."""
    take = await _submit(transcriber, pcm, options)
    async with AsyncExitStack() as resources:
        resources.push_async_callback(take.aclose)
        async for _ in take:
            pass
        return take.transcript


async def _submit(transcriber: Transcriber, pcm: Pcm, options: TranscriptionOptions) -> Take:
    # The session has taken the samples in already: sent again, as a refusal would have it, they would be said twice.
    while True:
        try:
            return await transcriber.submit(pcm, options)
        except Exception as exc:
            if rule_of(exc).code != "queue_full":
                raise
        await asyncio.sleep(QUEUE_RETRY_S)


@define(eq=False)
class Dictation:
    """Audio that is fed, and the transcript that grows with it. For one feeder at a time.

    Attributes:
        tracker: looks for speech; without any, audio only passes.
        duration_s: how much was fed.
        segments: final ones, in order, at their times in the session.
    """

    transcriber: Transcriber
    options: TranscriptionOptions
    tracker: SpeechTracker | None
    duration_s: float = 0.0
    segments: list[Segment] = field(factory=list[Segment])
    language: str = ""
    vocabulary: VocabularyUse | None = None
    _buffer: bytearray = field(factory=bytearray, repr=False)
    _start_s: float = 0.0
    _context: SpokenContext = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._context = SpokenContext(self.options)

    @property
    def hears_speech(self) -> bool:
        """Whether somebody has spoken since the last final segment; true if nothing looks for speech."""
        return self.tracker is None or self.tracker.speaks_in(self._start_s, self.duration_s)

    async def feed(self, pcm: Pcm) -> list[Segment]:
        """Take audio in, and transcribe every window that is complete.

        Returns:
            The segments that have become final.
        """
        if self.tracker is not None:
            await self.tracker.feed(pcm)
        self._buffer += pcm.data
        self.duration_s += pcm.duration_s
        fresh: list[Segment] = []
        self._drop_silence()
        while len(self._buffer) >= WINDOW_S * _BYTES_PER_SECOND:
            transcript = await self._transcribe(WINDOW_S)
            final, next_s = settle(transcript, WINDOW_S)
            fresh += self._accept([shifted(one, self._start_s) for one in final])
            self._cut(next_s)
            self._drop_silence()
        return fresh

    async def finish(self) -> JoinedTranscript:
        """Transcribe what is left, and return the whole."""
        rest_s = len(self._buffer) / _BYTES_PER_SECOND
        if rest_s >= SHORTEST_S and self.hears_speech:
            transcript = await self._transcribe(rest_s)
            self._accept([shifted(one, self._start_s) for one in transcript.segments])
        self._buffer.clear()
        return JoinedTranscript(
            language=self.language or self.options.language or "",
            duration_s=self.duration_s,
            segments=tuple(self.segments),
            vocabulary=self.vocabulary,
        )

    async def _transcribe(self, window_s: float) -> Transcript:
        window = Pcm(bytes(memoryview(self._buffer)[: round(window_s * SAMPLE_RATE) * 4]))
        transcript = await transcribe(self.transcriber, window, self._window_options())
        self.language = self.language or transcript.language
        self.vocabulary = self.vocabulary or transcript.vocabulary
        return transcript

    def _window_options(self) -> TranscriptionOptions:
        """Return the options of the next window: its language is that of the first, its prompt what was said."""
        # Speech was looked for here.
        options = evolve(self.options, speech=None, language=self.options.language or self.language or None)
        return self._context.applied(options)

    def _accept(self, segments: list[Segment]) -> list[Segment]:
        self.segments += segments
        if segments:
            self._context.add("".join(segment.text for segment in segments), segments[-1].temperature)
        return segments

    def _drop_silence(self) -> None:
        """Let audio pass in which nobody speaks, but for what may be the beginning of speech."""
        if self.tracker is None or self.hears_speech or self.tracker.is_undecided:
            return
        self._cut(max(0.0, len(self._buffer) / _BYTES_PER_SECOND - LEAD_S))

    def _cut(self, seconds: float) -> None:
        num_bytes = round(seconds * SAMPLE_RATE) * 4
        del self._buffer[:num_bytes]
        self._start_s += num_bytes / _BYTES_PER_SECOND
        if self.tracker is not None:
            self.tracker.forget_before(self._start_s)
