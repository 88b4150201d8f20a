"""Word times made plausible: punctuation joined, stretched words cut, and times in order within the audio.

The rules for punctuation and stretched words are OpenAI's (openai/whisper, `timing.py`); the last step is Headrace's:
every word starts where the one before it has ended or later, and none ends after the audio.
"""

from collections.abc import Sequence
from statistics import median

from attrs import define, evolve

from headrace_models.whisper.alignment import TimedWord
from headrace_models.whisper.results import Segment, Word

__all__ = ["join_punctuation", "place_words"]

_PREPENDED = "\"'“¿([{-"
_APPENDED = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001
_SENTENCE_ENDS = ".。!！?？"  # noqa: RUF001
_LONGEST_MEDIAN_S = 0.7
_SLACK_S = 0.5


@define
class _Draft:
    text: str
    start: float
    end: float
    probability: float


def join_punctuation(words: Sequence[TimedWord]) -> list[TimedWord]:
    """Join opening punctuation to the word after it, and closing punctuation to the word before it."""
    joined: list[TimedWord] = []
    for word in reversed(words):
        if joined and word.text.startswith(" ") and word.text.strip() and word.text.strip() in _PREPENDED:
            after = joined[-1]
            joined[-1] = evolve(after, text=word.text + after.text, tokens=word.tokens + after.tokens)
        else:
            joined.append(word)
    joined.reverse()
    result: list[TimedWord] = []
    for word in joined:
        if result and not result[-1].text.endswith(" ") and word.text and word.text in _APPENDED:
            before = result[-1]
            result[-1] = evolve(before, text=before.text + word.text, tokens=before.tokens + word.tokens)
        else:
            result.append(word)
    return result


def place_words(
    segments: Sequence[Segment],
    words: Sequence[TimedWord],
    *,
    offset_s: float,
    last_speech_s: float,
    duration_s: float,
    text_end: int,
) -> list[Segment]:
    """Give segments of one window their words, and fit the segments' times to them.

    Args:
        words: of the whole window, in order, as `align_windows` gives them.
        offset_s: start of the window.
        last_speech_s: where the last word before the window ended.
        duration_s: of the audio.
        text_end: ids below it are text.
    """
    lengths = [word.end_s - word.start_s for word in words if word.end_s != word.start_s]
    typical = min(_LONGEST_MEDIAN_S, median(lengths)) if lengths else 0.0
    if lengths:
        words = _cut_at_sentences(words, 2 * typical)
    remaining = list(reversed(join_punctuation(words)))
    placed: list[Segment] = []
    reached = last_speech_s
    for segment in segments:
        wanted = sum(token < text_end for token in segment.tokens)
        drafts: list[_Draft] = []
        while remaining and wanted > 0:
            word = remaining.pop()
            wanted -= len(word.tokens)
            start, end = (round(offset_s + time, 2) for time in (word.start_s, word.end_s))
            drafts.append(_Draft(word.text, start, end, word.probability))
        fitted = segment
        if drafts:
            fitted, reached = _fit(segment, drafts, typical, reached)
        placed.append(
            evolve(
                fitted,
                words=tuple(Word(text=d.text, start_s=d.start, end_s=d.end, probability=d.probability) for d in drafts),
            )
        )
    return _in_order(placed, last_speech_s, duration_s)


def _cut_at_sentences(words: Sequence[TimedWord], longest: float) -> list[TimedWord]:
    """Shorten what is too long beside the end of a sentence, where pauses are."""
    cut = list(words)
    for index in range(1, len(cut)):
        word = cut[index]
        if word.end_s - word.start_s > longest:
            if word.text in _SENTENCE_ENDS:
                cut[index] = evolve(word, end_s=word.start_s + longest)
            elif cut[index - 1].text in _SENTENCE_ENDS:
                cut[index] = evolve(word, start_s=word.end_s - longest)
    return cut


def _fit(segment: Segment, words: list[_Draft], typical: float, last_speech_s: float) -> tuple[Segment, float]:
    """Shorten the first words after a pause, and take the likelier of the segment's and its words' ends."""
    longest = 2 * typical
    first, last = words[0], words[-1]
    is_after_pause = first.end - last_speech_s > 4 * typical
    is_long = first.end - first.start > longest
    is_long_pair = len(words) > 1 and words[1].end - first.start > 2 * longest
    if is_after_pause and (is_long or is_long_pair):
        if len(words) > 1 and words[1].end - words[1].start > longest:
            first.end = words[1].start = max(words[1].end / 2, words[1].end - longest)
        first.start = max(0.0, first.end - longest)
    start, end = segment.start_s, segment.end_s
    if start < first.end and start - _SLACK_S > first.start:
        first.start = max(0.0, min(first.end - typical, start))
    else:
        start = first.start
    if end > last.start and end + _SLACK_S < last.end:
        last.end = max(last.start + typical, end)
    else:
        end = last.end
    return evolve(segment, start_s=start, end_s=end), end


def _in_order(segments: Sequence[Segment], earliest_s: float, duration_s: float) -> list[Segment]:
    """Put times in order: 0 <= start <= end <= duration, none before the end of the one before."""
    reached = min(max(0.0, earliest_s), duration_s)
    ordered: list[Segment] = []
    for segment in segments:
        if not segment.words:
            ordered.append(segment)
            continue
        words: list[Word] = []
        for word in segment.words:
            start = min(max(word.start_s, reached), duration_s)
            reached = min(max(word.end_s, start), duration_s)
            words.append(evolve(word, start_s=start, end_s=reached))
        start = min(max(0.0, segment.start_s), words[0].start_s)
        end = min(max(segment.end_s, words[-1].end_s), duration_s)
        ordered.append(evolve(segment, start_s=start, end_s=end, words=tuple(words)))
    return ordered
