"""Where somebody speaks, and where a pause begins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_http_api.audio.speech import FRAME_S, SpeechTracker
from headrace_http_api.audio_ports import SpeechFilter


def tracker_of(*frames):
    """A tracker that has heard so many frames of speech (positive) or of none (negative), in turn."""
    tracker = SpeechTracker(None, SpeechFilter())
    for count in frames:
        tracker.take([1.0 if count > 0 else 0.0] * abs(count))
    return tracker


@pytest.mark.parametrize(
    ("frames", "start", "pause"),
    [
        ((20, -30), 0, 20),
        ((20, -24), 0, None),
        # What begins before the pause is long enough may become speech.
        ((20, -24, 3), 0, None),
        ((20, -26, 3), 0, 20),
        # Too short for speech: the pause goes on through it.
        ((20, -10, 3, -20), 0, 20),
        ((20, -10, 9, -10, 9, -30), 0, 58),
        # A pause that is over ends what was before it, and not what follows.
        ((20, -30, 20), 0, 20),
        ((20, -30, 20), 30, None),
        ((20, -30, 20, -40), 30, 70),
        ((-50,), 0, None),
    ],
)
def test_the_first_pause_that_is_long_enough(frames, start, pause):
    """Of 0.8 seconds, 25 frames; counted from the end of speech."""
    found = tracker_of(*frames).pause_after(start * FRAME_S, 0.8)
    assert found == (None if pause is None else pytest.approx(pause * FRAME_S))


@pytest.mark.parametrize(
    ("frames", "start", "until"),
    [
        ((-30,), 0, 30),
        ((-30, 3), 0, 30),
        ((-30, 20), 10, 30),
        ((-30, 20), 40, 40),
        ((20, -30), 0, 0),
        ((20, -30), 25, 50),
    ],
)
def test_how_long_it_is_quiet(frames, start, until):
    """To the next speech, to what may become speech, or to the end."""
    assert tracker_of(*frames).quiet_until(start * FRAME_S) == pytest.approx(until * FRAME_S)


@given(st.lists(st.integers(-40, 40), min_size=1), st.lists(st.integers(-40, 40)))
def test_a_pause_stays_where_it_was_found(frames, more):
    """Whatever is heard later."""
    found = tracker_of(*frames).pause_after(0.0, 0.8)
    assert found is None or tracker_of(*frames, *more).pause_after(0.0, 0.8) == found
