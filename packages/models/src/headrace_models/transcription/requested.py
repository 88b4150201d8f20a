"""What a caller asks for, by shape, turned into what goes to the worker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace_models.audio.errors import AudioUnreadable
from headrace_models.transcription.messages import Samples, SpeechWanted
from headrace_models.whisper.options import TranscribeOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_models.transcription.messages import AudioSource
    from headrace_models.whisper.special import Task

__all__ = ["RequestedOptions", "SamplesLike", "SpeechFilter", "to_audio", "to_options", "to_speech"]

_BYTES_PER_SAMPLE = 4


class SamplesLike(Protocol):
    """Samples as bytes: float32, little-endian, 16 kHz, one channel."""

    @property
    def data(self) -> bytes: ...


class SpeechFilter(Protocol):
    """When a stretch of audio counts as speech, and whether what lies around it is cut off."""

    @property
    def threshold(self) -> float: ...
    @property
    def min_speech_s(self) -> float: ...
    @property
    def is_trimming(self) -> bool: ...


class RequestedOptions(Protocol):
    """The fields of `TranscribeOptions` that a request may set, and whether to look for speech first."""

    @property
    def task(self) -> Task: ...
    @property
    def language(self) -> str | None: ...
    @property
    def prompt(self) -> str | None: ...
    @property
    def vocabulary(self) -> Sequence[str]: ...
    @property
    def temperature(self) -> Sequence[float]: ...
    @property
    def beam_size(self) -> int | None: ...
    @property
    def condition_on_previous_text(self) -> bool: ...
    @property
    def no_speech_threshold(self) -> float | None: ...
    @property
    def word_timestamps(self) -> bool: ...
    @property
    def without_timestamps(self) -> bool: ...
    @property
    def repetition_guard(self) -> bool: ...
    @property
    def audio_context(self) -> int | None: ...
    @property
    def draft(self) -> Sequence[int]: ...
    @property
    def open_end(self) -> bool: ...
    @property
    def speech(self) -> SpeechFilter | None: ...


def to_options(requested: RequestedOptions | TranscribeOptions) -> TranscribeOptions:
    """Return the options that a model is given.

    Raises:
        InvalidTranscribeOption: a value is out of range, or two exclude each other.
    """
    if isinstance(requested, TranscribeOptions):
        return requested
    return TranscribeOptions(
        task=requested.task,
        language=requested.language,
        prompt=requested.prompt,
        vocabulary=tuple(requested.vocabulary),
        temperature=tuple(requested.temperature),
        beam_size=requested.beam_size,
        condition_on_previous_text=requested.condition_on_previous_text,
        no_speech_threshold=requested.no_speech_threshold,
        word_timestamps=requested.word_timestamps,
        without_timestamps=requested.without_timestamps,
        repetition_guard=requested.repetition_guard,
        audio_context=requested.audio_context,
        draft=tuple(requested.draft),
        open_end=requested.open_end,
    )


def to_speech(wanted: SpeechFilter | None) -> SpeechWanted | None:
    """Return what the worker is told about looking for speech."""
    if wanted is None:
        return None
    return SpeechWanted(threshold=wanted.threshold, min_speech_s=wanted.min_speech_s, is_trimming=wanted.is_trimming)


def to_audio(audio: bytes | Path | SamplesLike) -> AudioSource:
    """Return audio as the worker takes it.

    Raises:
        AudioUnreadable: bytes that are no whole number of samples.
    """
    if isinstance(audio, bytes | Path):
        return audio
    if len(audio.data) % _BYTES_PER_SAMPLE:
        raise AudioUnreadable(
            f"the samples have {len(audio.data)} bytes, which is no multiple of {_BYTES_PER_SAMPLE}: send float32."
        )
    return Samples(audio.data)
