"""Half an hour of real speech with pauses and music between: nothing is repeated, times go on, memory does not grow."""

import json
import re
import resource
import sys
from difflib import SequenceMatcher
from itertools import groupby, pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from headrace_models.audio import read_audio
from headrace_models.whisper import TranscribeOptions, load_whisper, transcribe
from headrace_models.whisper.guard import find_loop

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3600)]

RATE = 16_000
MINUTES = 30
SPEECH = Path(__file__).parent / "speech"


def words_of(text):
    return re.findall(r"[a-z']+", text.lower())


def music(seconds, random):
    """Return chords with overtones, each half a second to two seconds long, that swell and fade, on a soft hiss."""
    pieces = []
    while sum(map(len, pieces)) < seconds * RATE:
        time_s = np.arange(int(random.uniform(0.5, 2.0) * RATE)) / RATE
        root = 110 * 2 ** (random.integers(0, 25) / 12)
        tones = [
            np.sin(2 * np.pi * root * interval * overtone * time_s) / overtone
            for interval in (1.0, 1.26, 1.5)
            for overtone in (1, 2, 3, 5)
        ]
        swell = np.minimum(1, time_s * 20) * np.exp(-1.5 * time_s) * (1 + 0.2 * np.sin(2 * np.pi * 6 * time_s))
        pieces.append(0.05 * np.sum(tones, axis=0) * swell)
    sound = np.concatenate(pieces)[: int(seconds * RATE)]
    return (sound + 0.002 * random.standard_normal(len(sound))).astype(np.float32)


def make_audio(minutes, seed):
    """Return samples, and the sentences that are said: none twice in a row."""
    random = np.random.default_rng(seed)
    texts = {file: text for file, text in json.loads((SPEECH / "texts.json").read_text()).items() if "austen" in file}
    clips = {file: read_audio(SPEECH / file) for file in texts}
    parts, said, last = [], [], None
    while sum(map(len, parts)) < minutes * 60 * RATE:
        for _ in range(random.integers(2, 7)):
            last = random.choice([file for file in texts if file != last])
            said.append(texts[last])
            parts += [clips[last], np.zeros(int(random.uniform(0.2, 1.5) * RATE), np.float32)]
        if random.random() < 0.5:
            parts.append(music(random.uniform(5, 40), random))
        else:
            parts.append((0.001 * random.standard_normal(int(random.uniform(2, 25) * RATE))).astype(np.float32))
    return np.concatenate(parts), said


class Memory:
    """How much was resident when each part of the audio was done."""

    def __init__(self):
        self.samples = []

    def __call__(self, event):
        self.samples.append((event.position_s / event.duration_s, resident_bytes() or mx.get_active_memory()))

    def most(self, first, last):
        return max(size for share, size in self.samples if first <= share <= last)


def resident_bytes():
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("is_conditioned", [True, False])
def test_half_an_hour_with_pauses_and_music(is_conditioned):
    """All that is said is written once and in order, at times that never go back, in memory that stays the same."""
    samples, said = make_audio(MINUTES, seed=5)
    memory = Memory()
    options = TranscribeOptions(word_timestamps=True, condition_on_previous_text=is_conditioned)
    model = load_whisper("whisper-tiny.en", dtype="float32")
    found = transcribe(model, samples, options, on_event=memory)

    spoken, heard = words_of(" ".join(said)), words_of(found.text)
    matcher = SequenceMatcher(None, spoken, heard, autojunk=False)
    num_right = sum(block.size for block in matcher.get_matching_blocks())
    runs = [len(list(group)) for _, group in groupby(" ".join(words_of(one.text)) for one in found.segments)]
    times = [time for segment in found.segments for word in segment.words for time in (word.start_s, word.end_s)]
    print(
        f"{len(samples) / RATE:.0f} s: {len(spoken)} words said, {len(heard)} heard, {num_right} of them right; "
        f"{found.num_windows} windows, {found.num_retries} retries; longest run of a segment {max(runs)}; memory "
        f"{memory.most(0.1, 0.5) / 1e6:.0f} MB in the first half, {memory.most(0.5, 1) / 1e6:.0f} in the second"
    )
    assert num_right > 0.9 * len(spoken)
    assert len(heard) < 1.1 * len(spoken)
    assert max(runs) < 3
    # Five sentences in some order may compress as well as a loop does, so that loops are looked for themselves.
    assert all(find_loop(segment.tokens, model.tokenizer.special.eot) is None for segment in found.segments)
    assert times[0] >= 0
    assert all(first <= second for first, second in pairwise(times))
    assert times[-1] <= len(samples) / RATE
    starts = [segment.start_s for segment in found.segments]
    assert starts == sorted(starts)
    assert memory.most(0.5, 1) < 1.05 * memory.most(0.1, 0.5)
