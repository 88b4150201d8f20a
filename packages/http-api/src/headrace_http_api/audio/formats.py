"""A transcript as text, as subtitles, and as OpenAI's objects."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil

from headrace_http_api.audio_ports import TimedSegment, TimedWord, Transcript

__all__ = ["TEXT_FORMATS", "segment_body", "srt", "text", "transcript_body", "usage_body", "vtt", "word_body"]

_FRAMES_PER_SECOND = 100


def text(transcript: Transcript) -> str:
    """Return the text and a line end."""
    return transcript.text + "\n"


def srt(transcript: Transcript) -> str:
    """Return SubRip subtitles, one for each segment."""
    cues = [
        f"{number}\n{_clock(one.start_s, ',')} --> {_clock(one.end_s, ',')}\n{_line(one.text)}\n\n"
        for number, one in enumerate(transcript.segments, start=1)
    ]
    return "".join(cues)


def vtt(transcript: Transcript) -> str:
    """Return WebVTT subtitles, one for each segment."""
    cues = [
        f"{_clock(one.start_s, '.')} --> {_clock(one.end_s, '.')}\n{_escaped(_line(one.text))}\n\n"
        for one in transcript.segments
    ]
    return "WEBVTT\n\n" + "".join(cues)


TEXT_FORMATS: Mapping[str, tuple[Callable[[Transcript], str], str]] = {
    "text": (text, "text/plain; charset=utf-8"),
    "srt": (srt, "application/x-subrip; charset=utf-8"),
    "vtt": (vtt, "text/vtt; charset=utf-8"),
}


def transcript_body(transcript: Transcript, *, task: str, is_verbose: bool, has_words: bool) -> dict[str, object]:
    """Build OpenAI's object: the text alone, or with segments, and words if they were asked for."""
    body: dict[str, object] = {"text": transcript.text}
    if is_verbose:
        body |= {
            "task": task,
            "language": transcript.language,
            "duration": round(transcript.duration_s, 3),
            "segments": [segment_body(place, one) for place, one in enumerate(transcript.segments)],
        }
        if has_words:
            body["words"] = _words(transcript.segments)
    return body | {"usage": usage_body(transcript.duration_s)}


def usage_body(duration_s: float) -> dict[str, object]:
    """Build OpenAI's usage object of audio: whole seconds, begun ones counted."""
    return {"type": "duration", "seconds": ceil(duration_s)}


def segment_body(place: int, segment: TimedSegment) -> dict[str, object]:
    """Build OpenAI's segment; its `seek` is where it begins, in frames of 10 ms."""
    return {
        "id": place,
        "seek": round(segment.start_s * _FRAMES_PER_SECOND),
        "start": round(segment.start_s, 3),
        "end": round(segment.end_s, 3),
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }


def word_body(word: TimedWord) -> dict[str, object]:
    """Build OpenAI's word, without the space before it, and with its probability."""
    return {
        "word": word.text.strip(),
        "start": round(word.start_s, 3),
        "end": round(word.end_s, 3),
        "probability": round(word.probability, 4),
    }


def _words(segments: Sequence[TimedSegment]) -> list[dict[str, object]]:
    return [word_body(word) for segment in segments for word in segment.words]


def _clock(seconds: float, point: str) -> str:
    whole, ms = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02d}:{minute:02d}:{second:02d}{point}{ms:03d}"


def _line(words: str) -> str:
    """Keep a cue in one line, and free of what would end it or begin another one."""
    return " ".join(words.split()).replace("-->", "->")


def _escaped(line: str) -> str:
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
