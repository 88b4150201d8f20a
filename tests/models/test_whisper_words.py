"""Word times: warping, medians, punctuation, and the law that times are in order within the audio."""

from itertools import pairwise, product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_models.whisper.alignment import AlignRequest, TimedWord, align_windows
from headrace_models.whisper.results import Segment
from headrace_models.whisper.segmenting import cut_window
from headrace_models.whisper.tokenizer import load_tokenizer
from headrace_models.whisper.warping import median_filter, warp
from headrace_models.whisper.words import join_punctuation, place_words


def cheapest(costs):
    num_rows, num_columns = costs.shape
    total = np.full((num_rows + 1, num_columns + 1), np.inf)
    total[0, 0] = 0
    for i, j in product(range(1, num_rows + 1), range(1, num_columns + 1)):
        total[i, j] = costs[i - 1, j - 1] + min(total[i - 1, j - 1], total[i - 1, j], total[i, j - 1])
    return total[-1, -1]


@settings(max_examples=60, deadline=None)
@given(num_rows=st.integers(1, 9), num_columns=st.integers(1, 12), seed=st.integers(0, 999))
def test_warping_finds_a_cheapest_path(num_rows, num_columns, seed):
    """The path goes from corner to corner in single steps, and costs what the full recursion says is least."""
    costs = np.random.default_rng(seed).standard_normal((num_rows, num_columns)).astype(np.float32)
    rows, columns = warp(costs)
    assert (rows[0], columns[0], rows[-1], columns[-1]) == (0, 0, num_rows - 1, num_columns - 1)
    steps = set(zip(np.diff(rows).tolist(), np.diff(columns).tolist(), strict=True))
    assert steps <= {(0, 1), (1, 0), (1, 1)}
    assert abs(costs[rows, columns].sum() - cheapest(costs)) < 1e-4


def test_medians_are_of_mirrored_neighbours():
    """A spike goes, an edge is mirrored, and what is shorter than half a window stays."""
    x = np.array([[1, 9, 2, 3, 4, 100, 5, 6]], np.float32)
    assert median_filter(x, 3).tolist() == [[9, 2, 3, 3, 4, 5, 6, 5]]
    assert median_filter(x[:, :1], 3).tolist() == [[1]]


def word(text, start, end, count=1):
    return TimedWord(text=text, tokens=tuple(range(count)), start_s=start, end_s=end, probability=0.5)


def test_punctuation_joins_its_word():
    """An opening mark goes to the word after it, a closing one to the word before it; tokens go along."""
    found = join_punctuation([word(' "', 0, 1), word("Hi", 1, 2), word("!", 2, 3), word('"', 3, 4), word(" you", 4, 5)])
    assert [(one.text, one.start_s, one.end_s, len(one.tokens)) for one in found] == [
        (' "Hi!"', 1, 2, 4),
        (" you", 4, 5, 1),
    ]


times = st.floats(0, 30, allow_nan=False)


@settings(max_examples=150, deadline=None)
@given(
    raw=st.lists(st.tuples(times, times, st.sampled_from([" a", " bcd", ".", " (", "?"])), max_size=12),
    bounds=st.lists(times, min_size=2, max_size=4),
    offset=st.floats(0, 90),
    last=st.floats(0, 95),
    rest=st.floats(0.1, 30),
)
def test_times_are_in_order_within_the_audio(raw, bounds, offset, last, rest):
    """Whatever alignment gives, 0 <= start <= end <= duration, no word overlaps the one before, no token is lost."""
    duration = round(offset + rest, 2)
    words = [word(text, min(a, b), max(a, b)) for a, b, text in raw]
    bounds = sorted(bounds)
    share = len(words) // (len(bounds) - 1) + 1
    segments = [
        Segment(
            start_s=min(offset + start, duration),
            end_s=min(offset + end, duration),
            text="",
            tokens=(0,) * max(0, min(share, len(words) - index * share)),
            temperature=0,
            avg_logprob=0,
            compression_ratio=1,
            no_speech_prob=0,
        )
        for index, (start, end) in enumerate(pairwise(bounds))
    ]
    placed = place_words(
        segments, words, offset_s=offset, last_speech_s=min(last, offset), duration_s=duration, text_end=10**6
    )
    found = [one for segment in placed for one in segment.words]
    reached = 0.0
    for one in found:
        assert 0 <= reached <= one.start_s <= one.end_s <= duration
        reached = one.end_s
    for segment in placed:
        assert 0 <= segment.start_s <= segment.end_s <= duration
    assert "".join(one.text for one in found) == "".join(one.text for one in words)


def test_windows_align_together_as_alone(tiny_whisper):
    """A window's words, times and probabilities do not depend on the windows beside it."""
    random = np.random.default_rng(5)
    config, special = tiny_whisper.config, tiny_whisper.tokenizer.special
    start = special.start(language="en", task="transcribe", with_timestamps=True)
    requests = []
    for text in (" hello there, you", "", " a b"):
        mel = random.standard_normal((1, config.window_frames, config.num_mels)).astype(np.float32)
        requests.append(
            AlignRequest(
                audio=tiny_whisper.encode(mel),
                start=start,
                text_tokens=tuple(tiny_whisper.tokenizer.encode(text)),
                language="en",
                num_positions=40,
            )
        )
    together = align_windows(tiny_whisper, requests)
    for one, found in zip(requests, together, strict=True):
        (alone,) = align_windows(tiny_whisper, [one])
        assert [(w.text, w.start_s, w.end_s) for w in found] == [(w.text, w.start_s, w.end_s) for w in alone]
        assert tuple(token for w in found for token in w.tokens) == one.text_tokens
        assert all(0 <= w.start_s <= w.end_s <= 0.8 and 0 <= w.probability <= 1 for w in found)
    assert [w.text for w in together[0]] == [" hello", " there", ",", " you"]


def test_windows_are_cut_where_timestamps_meet():
    """The examples of OpenAI's loop: pairs, a lone end, none at all, and text that is cut off."""
    t = 100
    closed = cut_window([t, 1, 2, t + 10, t + 10, 3, t + 20], timestamp_begin=t, num_frames=300)
    assert [(p.start, p.end, p.tokens) for p in closed.pieces] == [
        (0, 20, (t, 1, 2, t + 10)),
        (20, 40, (t + 10, 3, t + 20)),
    ]
    assert (closed.advance, closed.is_complete) == (300, True)
    cut_off = cut_window([t, 1, t + 10, t + 12, 3, 4], timestamp_begin=t, num_frames=300)
    assert [(p.start, p.end) for p in cut_off.pieces] == [(0, 20)]
    assert (cut_off.advance, cut_off.is_complete) == (20, False)
    pause = cut_window([t, 1, t + 10, t + 12, 3, 4], timestamp_begin=t, num_frames=300, ends_in_pause=True)
    assert [(p.start, p.end) for p in pause.pieces] == [(0, 20), (24, 300)]
    assert (pause.advance, pause.is_complete) == (300, True)
    early = cut_window([t, 1, t + 10, t + 12], timestamp_begin=t, num_frames=300, ends_in_pause=True)
    assert (len(early.pieces), early.advance) == (1, 20)
    late = cut_window([t, 1, t + 110, t + 110], timestamp_begin=t, num_frames=300, ends_in_pause=True)
    assert (len(late.pieces), late.advance) == (1, 300)
    plain = cut_window([1, 2, 3], timestamp_begin=t, num_frames=300)
    assert [(p.start, p.end) for p in plain.pieces] == [(0, 300)]
    assert plain.advance == 300
    assert cut_window([t, 1, t + 30], timestamp_begin=t, num_frames=300).pieces[0].end == 60


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(95, 130), max_size=12), num_frames=st.integers(1, 60), pause=st.booleans())
def test_every_window_moves_on(tokens, num_frames, pause):
    """Whatever tokens come, the next window starts later, and not after the audio of this one."""
    cut = cut_window(tokens, timestamp_begin=100, num_frames=num_frames, ends_in_pause=pause)
    assert 1 <= cut.advance <= num_frames


def test_words_keep_all_tokens_and_characters():
    """Splitting text in any script into words loses no token; characters of several tokens stay whole."""
    tokenizer = load_tokenizer(None, 51_865, is_multilingual=True)
    for text, language in ((" Hello, naïve 🎉🎉 world's end", "en"), ("今天天气很好", "zh"), (" привет мир", "ru")):
        ids = tokenizer.encode(text)
        words = tokenizer.split_words(ids, language)
        assert [token for _, tokens in words for token in tokens] == ids
        assert "".join(part for part, _ in words) == text
        cut = tokenizer.split_words(ids[:-1], language)
        assert [token for _, tokens in cut for token in tokens] == ids[:-1]
