"""From a take's audio to the samples that are transcribed: read, and searched for speech where that is wanted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, frozen

from headrace_models.audio.reading import read_audio
from headrace_models.audio.resampling import SAMPLE_RATE
from headrace_models.audio.speech import SpeechDetector, SpeechOptions, crop_to_speech, find_speech

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from headrace_models.audio.limits import AudioLimits
    from headrace_models.transcription.messages import AudioSource, Samples, SpeechWanted
    from headrace_models.whisper.results import Segment, Word

__all__ = ["Heard", "hear", "moved", "read_samples", "to_array"]


@frozen(kw_only=True, eq=False)
class Heard:
    """Audio that was read.

    Attributes:
        samples: `(N,)` float32 at 16 kHz: what is to be transcribed.
        offset_s: where they begin in the whole audio.
        duration_s: of the whole audio.
        spans: where somebody speaks in the whole audio; None if nobody asked.
        vad_s: how long finding that took.
    """

    samples: NDArray[np.float32]
    offset_s: float
    duration_s: float
    spans: tuple[tuple[float, float], ...] | None
    vad_s: float

    @property
    def is_silent(self) -> bool:
        """Whether speech was looked for and there is none."""
        return self.spans == ()


def hear(
    audio: AudioSource,
    limits: AudioLimits,
    speech: SpeechWanted | None,
    make_detector: Callable[[], SpeechDetector] = SpeechDetector.load,
) -> Heard:
    """Read audio and look for speech.

    Raises:
        AudioError: the audio, or what counts as speech, is at fault.
        VoiceDetectorMissing: nothing is installed that finds speech.
    """
    samples = read_samples(audio, limits)
    duration_s = len(samples) / SAMPLE_RATE
    if speech is None:
        return Heard(samples=samples, offset_s=0.0, duration_s=duration_s, spans=None, vad_s=0.0)
    started = time.perf_counter()
    options = SpeechOptions(threshold=speech.threshold, min_speech_s=speech.min_speech_s)
    spans = find_speech(samples, options, detector=make_detector())
    offset_s = 0.0
    if speech.is_trimming:
        samples, offset_s = crop_to_speech(samples, spans)
    return Heard(
        samples=samples,
        offset_s=offset_s,
        duration_s=duration_s,
        spans=tuple(spans),
        vad_s=time.perf_counter() - started,
    )


def read_samples(audio: AudioSource, limits: AudioLimits) -> NDArray[np.float32]:
    """Read audio as 16 kHz mono; samples stay as they are.

    Raises:
        AudioError: the audio is at fault.
    """
    if isinstance(audio, bytes | Path):
        return read_audio(audio, limits=limits)
    return to_array(audio)


def to_array(samples: Samples) -> NDArray[np.float32]:
    """Return `(N,)` float32 of samples as bytes."""
    return np.frombuffer(samples.data, "<f4").astype(np.float32, copy=False)


def moved(segments: Sequence[Segment], offset_s: float) -> tuple[Segment, ...]:
    """Return segments later by so many seconds, their words too."""
    if not offset_s:
        return tuple(segments)
    return tuple(
        evolve(
            segment,
            start_s=segment.start_s + offset_s,
            end_s=segment.end_s + offset_s,
            words=tuple(_moved_word(word, offset_s) for word in segment.words),
        )
        for segment in segments
    )


def _moved_word(word: Word, offset_s: float) -> Word:
    return evolve(word, start_s=word.start_s + offset_s, end_s=word.end_s + offset_s)
