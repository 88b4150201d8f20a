"""One dictation that comes in pieces: each complete window is transcribed at once (W-25)."""

from contextlib import AsyncExitStack

from attrs import define, evolve, field

from headrace_http_api.audio.speech import SpeechTracker
from headrace_http_api.audio.transcripts import JoinedTranscript, Segment, settle, shifted
from headrace_http_api.audio_ports import SAMPLE_RATE, Pcm, Transcriber, Transcript, TranscriptionOptions, VocabularyUse

__all__ = ["Dictation", "new_tracker"]

WINDOW_S = 30.0
SHORTEST_S = 0.1
# Before the first speech so much audio is kept.
LEAD_S = 0.5
# What was said last, given to the model before the next window; a vocabulary needs the room too.
CONTEXT_CHARS = 800
CONTEXT_CHARS_BESIDE_VOCABULARY = 200
# As OpenAI's: text that came of a higher temperature conditions nothing.
MAX_CONTEXT_TEMPERATURE = 0.5

_BYTES_PER_SECOND = 4 * SAMPLE_RATE


def new_tracker(transcriber: Transcriber, options: TranscriptionOptions) -> SpeechTracker | None:
    """Make what looks for speech, if the options ask for it.

    Raises:
        VoiceDetectorMissing: nothing is installed that finds speech.
    """
    return None if options.speech is None else SpeechTracker(transcriber.new_speech_detector(), options.speech)


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
    _context: str = field(default="", repr=False)

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
        async with AsyncExitStack() as resources:
            take = await self.transcriber.submit(window, self._window_options())
            resources.push_async_callback(take.aclose)
            async for _ in take:
                pass
            transcript = take.transcript
        self.language = self.language or transcript.language
        self.vocabulary = self.vocabulary or transcript.vocabulary
        return transcript

    def _window_options(self) -> TranscriptionOptions:
        """Return the options of the next window: its language is that of the first, its prompt what was said."""
        # Speech was looked for here.
        options = evolve(self.options, speech=None, language=self.options.language or self.language or None)
        if not self._context or not options.condition_on_previous_text:
            return options
        return evolve(options, prompt=" ".join(part for part in (options.prompt, self._context) if part))

    def _accept(self, segments: list[Segment]) -> list[Segment]:
        self.segments += segments
        if segments:
            num_chars = CONTEXT_CHARS_BESIDE_VOCABULARY if self.options.vocabulary else CONTEXT_CHARS
            is_sure = segments[-1].temperature <= MAX_CONTEXT_TEMPERATURE
            said = self._context + "".join(segment.text for segment in segments)
            self._context = said[-num_chars:].strip() if is_sure else ""
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
