"""Transcripts as subtitles."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_http_api.audio.formats import srt, vtt

CUE = re.compile(r"(\d\d):(\d\d):(\d\d)[.,](\d{3}) --> (\d\d):(\d\d):(\d\d)[.,](\d{3})\Z")
TIMES = st.floats(0, 90_000, allow_nan=False)
PIECES = st.sampled_from(["a", " ", "\n", "-->", "<", "&", "\r", "\u2028", "1"])
TEXTS = st.lists(PIECES, max_size=12).map("".join).filter(str.strip)


def blocks(text):
    return [block.split("\n") for block in text.split("\n\n") if block]


def seconds(parts):
    hour, minute, second, ms = map(int, parts)
    return hour * 3600 + minute * 60 + second + ms / 1000


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TIMES, TIMES, TEXTS), max_size=5))
def test_subtitles_hold_each_segment_once(make_segment, make_transcript, entries):
    """Any text stays in its own cue of one line, and its times survive to the millisecond."""
    segments = [make_segment(text, min(a, b), max(a, b)) for a, b, text in entries]
    transcript = make_transcript(segments)

    for written, num_head_lines in ((srt(transcript), 1), (vtt(transcript).removeprefix("WEBVTT\n\n"), 0)):
        assert len(blocks(written)) == len(segments)
        for number, (block, segment) in enumerate(zip(blocks(written), segments, strict=True), start=1):
            assert block[:num_head_lines] == [str(number)][:num_head_lines]
            times = CUE.match(block[num_head_lines]).groups()
            assert abs(seconds(times[:4]) - segment.start_s) <= 0.0005 + 1e-6
            assert abs(seconds(times[4:]) - segment.end_s) <= 0.0005 + 1e-6
            assert len(block) <= num_head_lines + 2
            assert not any("-->" in line for line in block[num_head_lines + 1 :])


def test_nothing_said_is_an_empty_file(make_transcript):
    """No cues, but still a WebVTT header."""
    assert srt(make_transcript([])) == ""
    assert vtt(make_transcript([])) == "WEBVTT\n\n"


def test_markup_is_escaped_in_webvtt_alone(make_segment, make_transcript):
    """WebVTT reads tags; SubRip players show text as it is."""
    transcript = make_transcript([make_segment(" a < b & c", 0.0, 1.0)])

    assert "a &lt; b &amp; c" in vtt(transcript)
    assert "a < b & c" in srt(transcript)
